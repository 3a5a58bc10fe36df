//! The load loop: handles completions, accounts for them, submits new requests, and waits if no
//! request has completed.
//!
//! The loop does not allocate memory, and it reads the clock twice per batch.

use std::time::Duration;

use fathom_trace::Clock;
use fathom_trace::histogram::{Counts, FINE};

use crate::control::{Control, Phase, Seat};
use crate::cpu;
use crate::error::{Error, Result};
use crate::options::Load;
use crate::port::{Counters, Done, Op, Port};
use crate::verify::{Checker, Verified};
use crate::workload::{Range, Workload};

/// A slot, which is free or holds a request in flight.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Time of submission in ticks of [`Clock`].
    sent: u64,
    offset: u64,
    op: Op,
    busy: bool,
}

/// Measurements of one worker.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Latencies of the requests that completed in the measured window or were in flight at its
    /// end, indexed by [`Op`].
    pub latency: [Counts<FINE>; 5],
    /// Number of requests that completed in the measured window, indexed by [`Op`].
    pub in_window: [u64; 5],
    /// Number of requests that were in flight when the measured window ended.
    pub in_flight_at_end: u64,
    /// Time for which the oldest of these had been in flight then, in ticks. 0: no request.
    pub oldest_in_flight: u64,
    /// Number of all completed requests, including those outside the measured window.
    pub completed: u64,
    /// Number of failed requests that were tolerated.
    pub errors: u64,
    /// Length of the measured window in ticks.
    pub window: u64,
    /// CPU time of this thread in the measured window, in ns.
    pub cpu_ns: u64,
    pub kicks: u64,
    pub calls: u64,
    pub verified: Option<Verified>,
    /// Number of pages found marked in the dirty log.
    pub log_pages: u64,
}

/// State of the measured window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Window {
    /// Completed requests are not counted.
    Closed,
    Open,
    /// The window has ended, and the requests that were in flight at its end are completing. These
    /// latencies are counted, because a stall at the end of the window would otherwise be missing.
    Ending,
}

/// State at the start of the measured window.
#[derive(Clone, Copy, Debug, Default)]
struct WindowStart {
    at: u64,
    cpu_ns: u64,
    counters: Counters,
}

/// Source of requests.
#[derive(Debug)]
enum Source {
    Load(Workload),
    /// Reads every block whose contents are known, once.
    ReadBack {
        next: u64,
    },
}

/// Observes single requests and timestamps each of them. [`Nobody`] observes nothing and costs
/// nothing.
pub trait Observer {
    /// Whether the observer is called at all.
    const LOOKS: bool = true;

    /// Returns whether no more requests are to be sent. `now` is the current time in ticks.
    fn is_over(&self, now: u64) -> bool;

    /// Called before the request of a free slot is queued. Returns a delay to wait first, if any.
    fn starts(&mut self, slot: u16, offset: u64, clock: &Clock) -> Option<Duration>;

    /// Called after the delay. `ticks` is its actual length, and `end` is the time at its end.
    fn waited(&mut self, slot: u16, ticks: u64, end: u64);

    /// Called when a request has completed.
    fn ended(&mut self, done: Done, now: u64);
}

/// An observer that observes nothing.
#[derive(Debug)]
pub struct Nobody;

impl Observer for Nobody {
    const LOOKS: bool = false;

    fn is_over(&self, _now: u64) -> bool {
        false
    }

    fn starts(&mut self, _slot: u16, _offset: u64, _clock: &Clock) -> Option<Duration> {
        None
    }

    fn waited(&mut self, _slot: u16, _ticks: u64, _end: u64) {}

    fn ended(&mut self, _done: Done, _now: u64) {}
}

/// Drives one queue.
pub struct Worker<'a, P, O> {
    port: P,
    observer: O,
    index: u16,
    range: Range,
    load: &'a Load,
    control: &'a Control,
    clock: &'static Clock,
    source: Source,
    checker: Option<Checker<'a>>,
    slots: Vec<Slot>,
    free: Vec<u16>,
    done: Vec<Done>,
    in_flight: u32,
    completed: u64,
    /// Number of requests that may still be sent.
    budget: u64,
    /// Number of requests until the port must be idle once.
    until_rest: u64,
    phase: Phase,
    window: Window,
    start: WindowStart,
    measured: Measured,
}

impl<'a, P: Port, O: Observer> Worker<'a, P, O> {
    pub fn new(
        port: P,
        observer: O,
        index: u16,
        range: Range,
        load: &'a Load,
        control: &'a Control,
        checker: Option<Checker<'a>>,
    ) -> Worker<'a, P, O> {
        let depth = usize::from(load.iodepth);
        let idle = Slot {
            sent: 0,
            offset: 0,
            op: Op::Read,
            busy: false,
        };
        Worker {
            until_rest: rest_period(&port),
            port,
            observer,
            index,
            range,
            load,
            control,
            clock: Clock::get(),
            source: Source::Load(Workload::new(load, index, range)),
            checker,
            slots: vec![idle; depth],
            free: (0..load.iodepth).rev().collect(),
            done: Vec::with_capacity(depth),
            in_flight: 0,
            completed: 0,
            budget: u64::MAX,
            phase: Phase::Ramp,
            window: Window::Closed,
            start: WindowStart::default(),
            measured: Measured::default(),
        }
    }

    /// Runs the load on the calling thread until it ends, and then verifies the disk if requested.
    pub fn run(&mut self) -> Result<Measured> {
        if !self.load.cpus.is_empty() {
            let cpu = self.load.cpus[usize::from(self.index) % self.load.cpus.len()];
            cpu::pin(cpu)?;
        }
        if !self.load.verify_only {
            self.run_load()?;
            self.drain()?;
        }
        if self.checker.is_some() {
            self.read_back()?;
        }
        self.measured.completed = self.completed;
        self.measured.verified = self.checker.as_ref().map(Checker::verified);
        self.measured.log_pages = self.port.log_pages();
        Ok(std::mem::take(&mut self.measured))
    }

    /// Returns the observer.
    pub fn observer(&mut self) -> &mut O {
        &mut self.observer
    }

    /// Consumes the worker and returns the observer.
    pub fn into_observer(self) -> O {
        self.observer
    }

    fn run_load(&mut self) -> Result<()> {
        loop {
            let phase = self.control.phase();
            if phase != self.phase {
                self.enter(phase)?;
                if phase == Phase::Stop {
                    return Ok(());
                }
            }
            self.fill()?;
            if self.reap()? > 0 {
                continue;
            }
            if self.in_flight == 0 && !self.rest()? {
                break;
            }
            if self.in_flight > 0 {
                self.port.wait()?;
            }
        }
        self.close_window();
        Ok(())
    }

    /// Waits until all requests have completed.
    fn drain(&mut self) -> Result<()> {
        while self.in_flight > 0 {
            self.check_abort()?;
            if self.reap()? == 0 {
                self.port.wait()?;
            }
        }
        self.window = Window::Closed;
        self.port.at_rest()
    }

    /// Reads and checks every block whose contents are known.
    fn read_back(&mut self) -> Result<()> {
        let bs = u64::from(self.load.bs);
        let start = self.load.offset + self.range.first * bs;
        self.port.drop_cache(start, self.range.count * bs)?;
        self.source = Source::ReadBack { next: 0 };
        self.budget = u64::MAX;
        self.until_rest = u64::MAX;
        loop {
            self.check_abort()?;
            self.fill()?;
            if self.in_flight == 0 {
                return self.port.at_rest();
            }
            if self.reap()? == 0 {
                self.port.wait()?;
            }
        }
    }

    fn check_abort(&self) -> Result<()> {
        match self.control.phase() {
            Phase::Abort => Err(Error::Aborted),
            _ => Ok(()),
        }
    }

    /// Handles a change of the phase: opens or closes the measured window.
    fn enter(&mut self, phase: Phase) -> Result<()> {
        match phase {
            Phase::Ramp => {}
            Phase::Measure => self.open_window(),
            Phase::Stop => self.close_window(),
            Phase::Abort => return Err(Error::Aborted),
        }
        self.phase = phase;
        Ok(())
    }

    fn seat(&self) -> &Seat {
        &self.control.seats()[usize::from(self.index)]
    }

    fn open_window(&mut self) {
        self.budget = self.load.number_ios.unwrap_or(u64::MAX);
        self.window = Window::Open;
        self.start = WindowStart {
            counters: self.port.counters(),
            cpu_ns: cpu::thread_ns(),
            at: self.clock.now(),
        };
    }

    /// Ends the measured window. The latencies of the requests that are in flight still count, up
    /// to the end of [`Worker::drain`].
    fn close_window(&mut self) {
        if self.window != Window::Open {
            return;
        }
        self.window = Window::Ending;
        let now = self.clock.now();
        let counters = self.port.counters();
        self.measured.window = now - self.start.at;
        self.measured.cpu_ns = cpu::thread_ns() - self.start.cpu_ns;
        self.measured.kicks = counters.kicks - self.start.counters.kicks;
        self.measured.calls = counters.calls - self.start.counters.calls;
        let latency = &self.measured.latency;
        self.measured.in_window = std::array::from_fn(|op| latency[op].count());
        let busy = self.slots.iter().filter(|slot| slot.busy);
        let ages = busy.map(|slot| now.saturating_sub(slot.sent));
        self.measured.oldest_in_flight = ages.max().unwrap_or(0);
        self.measured.in_flight_at_end = self.in_flight.into();
        self.seat().close_window();
    }

    /// Handles the state in which no request is in flight. Lets the port perform its idle checks if
    /// they are due. Returns `false` if no more requests may be sent.
    fn rest(&mut self) -> Result<bool> {
        if self.until_rest == 0 {
            self.port.at_rest()?;
            self.until_rest = rest_period(&self.port);
            return Ok(true);
        }
        Ok(self.budget > 0)
    }

    /// Sends a request from each free slot.
    #[inline(always)]
    fn fill(&mut self) -> Result<()> {
        if self.free.is_empty() {
            return Ok(());
        }
        let sent = self.clock.now();
        if O::LOOKS && self.observer.is_over(sent) {
            self.budget = 0;
        }
        while let Some(&slot) = self.free.last() {
            if self.budget == 0 || self.until_rest == 0 {
                break;
            }
            let Some((op, block)) = self.next() else {
                break;
            };
            self.free.pop();
            self.budget -= 1;
            self.until_rest -= 1;
            if let Some(checker) = &mut self.checker {
                checker.start(slot, op, block, self.port.buffer(slot));
            }
            let offset = self.load.offset + block * u64::from(self.load.bs);
            if O::LOOKS {
                self.show_start(slot, offset)?;
            }
            self.port.queue(slot, op, offset);
            self.slots[usize::from(slot)] = Slot {
                sent,
                offset,
                op,
                busy: true,
            };
            self.in_flight += 1;
        }
        self.seat().publish(self.completed, self.in_flight);
        self.port.submit()
    }

    #[inline]
    fn show_start(&mut self, slot: u16, offset: u64) -> Result<()> {
        if let Some(delay) = self.observer.starts(slot, offset, self.clock) {
            // Submit the requests queued before, so that they are not delayed.
            self.port.submit_now()?;
            let start = self.clock.now();
            std::thread::sleep(delay);
            let end = self.clock.now();
            self.observer.waited(slot, end - start, end);
        }
        Ok(())
    }

    /// Returns the next request, or `None` if no request can be sent at the moment.
    #[inline(always)]
    fn next(&mut self) -> Option<(Op, u64)> {
        match (&mut self.source, &self.checker) {
            (Source::Load(w), None) => Some((w.op(), w.block())),
            (Source::Load(w), Some(checker)) => next_idle(w, checker),
            (Source::ReadBack { next }, Some(checker)) => {
                let block = checker.next_known(*next)?;
                *next = block + 1;
                Some((Op::Read, block))
            }
            (Source::ReadBack { .. }, None) => None,
        }
    }

    /// Accounts for completed requests, and returns their number.
    #[inline(always)]
    fn reap(&mut self) -> Result<usize> {
        self.port.reap(&mut self.done)?;
        let count = self.done.len();
        if count == 0 {
            return Ok(0);
        }
        let now = self.clock.now();
        for i in 0..count {
            let done = self.done[i];
            if O::LOOKS {
                self.observer.ended(done, self.clock.now());
            }
            let slot = &mut self.slots[usize::from(done.slot)];
            if !std::mem::replace(&mut slot.busy, false) {
                return Err(self.completed_twice(done.slot));
            }
            let slot = *slot;
            if done.status != 0 {
                self.failed(slot, done.status)?;
            } else if self.window != Window::Closed {
                let ticks = now.saturating_sub(slot.sent);
                self.measured.latency[slot.op as usize].record(ticks);
            }
            if let Some(checker) = &mut self.checker {
                let buffer = self.port.buffer(done.slot);
                checker.finish(done.slot, slot.op, done.status == 0, buffer)?;
            }
            self.free.push(done.slot);
        }
        self.done.clear();
        self.in_flight -= count as u32;
        self.completed += count as u64;
        self.seat().publish(self.completed, self.in_flight);
        Ok(count)
    }

    #[cold]
    fn completed_twice(&self, slot: u16) -> Error {
        Error::Device {
            queue: usize::from(self.index),
            what: format!("request {slot} was completed, but is not in flight"),
        }
    }

    #[cold]
    fn failed(&mut self, slot: Slot, status: i32) -> Result<()> {
        self.measured.errors += 1;
        if self.load.continue_on_error {
            return Ok(());
        }
        Err(Error::Request {
            op: slot.op.name(),
            offset: slot.offset,
            len: self.load.bs,
            status: self.port.describe_status(status),
        })
    }
}

fn rest_period<P: Port>(port: &P) -> u64 {
    port.rest_every().map_or(u64::MAX, u64::from)
}

/// Draws blocks until one is found that no request in flight touches. Gives up after 64 draws.
fn next_idle(w: &mut Workload, checker: &Checker<'_>) -> Option<(Op, u64)> {
    let op = w.op();
    for _ in 0..64 {
        let block = w.block();
        if op == Op::Flush || !checker.is_busy(block) {
            return Some((op, block));
        }
    }
    None
}

#[cfg(test)]
mod tests;
