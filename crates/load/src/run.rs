//! Starts and supervises the workers, and collects their measurements.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use fathom_trace::Clock;

use crate::control::{Control, Phase};
use crate::cpu::ProcessCpu;
use crate::error::{Error, Result};
use crate::ledger::{Area, Ledger, Part};
use crate::load::{Measured, Nobody, Worker};
use crate::options::Load;
use crate::port::Port;
use crate::report::Outcome;
use crate::verify::Checker;
use crate::workload::{Range, range_of};

/// Maximum time between two checks of the workers.
const TICK: Duration = Duration::from_millis(100);
/// Interval between two calls of the progress function.
const PROGRESS: Duration = Duration::from_millis(500);

/// Progress of a run, for display.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Phase of the run at the time of the call.
    pub phase: Phase,
    /// Time since the start.
    pub elapsed: Duration,
    /// Duration of ramp and measurement. `None` if the run ends after a number of requests.
    pub total: Option<Duration>,
    /// Number of requests completed since the start.
    pub completed: u64,
    /// Requests per second since the previous call.
    pub iops: f64,
}

/// The part of the supervising thread that depends on the kind of target.
pub trait Supervisor {
    /// Sleeps for at most `time`. Returns `true` after an event that explains why no request has
    /// completed for a while, such as a reconnect.
    fn wait(&mut self, time: Duration, control: &Control) -> Result<bool>;

    /// Wakes sleeping workers, so that they read the current phase.
    fn wake(&self);

    /// Returns the CPU time of the process that serves the requests.
    fn backend_cpu(&self) -> Option<ProcessCpu>;

    /// Describes why a queue may have stopped, for an error message.
    fn diagnose(&self, queue: usize, completed: u64, in_flight: u32) -> String;
}

/// The used range of the disk, in blocks.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub blocks: u64,
}

impl Geometry {
    /// Applies the options to a disk of `capacity` bytes whose requests must be multiples of
    /// `align` bytes.
    pub fn new(load: &Load, capacity: u64, align: u32) -> Result<Geometry> {
        let refuse = |text: String| Err(Error::Options(text));
        let bs = u64::from(load.bs);
        if load.offset >= capacity {
            return refuse(format!(
                "--offset {} is not below the disk's size, {capacity}",
                load.offset
            ));
        }
        let size = load.size.unwrap_or(capacity - load.offset);
        if load
            .offset
            .checked_add(size)
            .is_none_or(|end| end > capacity)
        {
            return refuse(format!(
                "--offset {} and --size {size} pass the disk's end at {capacity}",
                load.offset
            ));
        }
        let align = u64::from(align.max(1));
        if !bs.is_multiple_of(align) || !load.offset.is_multiple_of(align) {
            return refuse(format!(
                "--bs and --offset must be multiples of the disk's block size, {align}"
            ));
        }
        let geometry = Geometry { blocks: size / bs };
        let own = geometry.range(load, 0).count;
        let needed = if load.verify {
            2 * u64::from(load.iodepth)
        } else {
            1
        };
        if own < needed {
            return refuse(format!(
                "{size} bytes are {own} blocks per queue; at least {needed} are needed"
            ));
        }
        Ok(geometry)
    }

    /// Returns the blocks that a queue uses. Each queue gets its own slice if contents are
    /// verified, so that only one queue writes a block. Sequential queues also get their own
    /// slices, because they would otherwise all read the same blocks.
    pub fn range(&self, load: &Load, index: u16) -> Range {
        let own_slice = load.verify || !load.rw.is_random();
        range_of(self.blocks, index, load.queues, own_slice)
    }
}

/// Runs one worker per port. Each closure in `ports` creates its port on the worker's thread.
pub fn run<P, F>(
    load: &Load,
    geometry: Geometry,
    ports: Vec<F>,
    boss: &mut dyn Supervisor,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Outcome>
where
    P: Port,
    F: FnOnce() -> Result<P> + Send,
{
    let ranges: Vec<Range> = (0..load.queues).map(|i| geometry.range(load, i)).collect();
    let mut ledger = open_ledger(load, geometry)?;
    let parts: Vec<Option<Part<'_>>> = match &mut ledger {
        Some(ledger) => ledger.split(&ranges).into_iter().map(Some).collect(),
        None => ranges.iter().map(|_| None).collect(),
    };
    let control = Control::new(load.queues);
    let cause = OnceLock::new();
    let clock = Clock::get();
    let mut watch = Watch::new(load, &control);
    if load.ramp.is_zero() {
        watch.enter(Phase::Measure, boss);
    }
    thread::scope(|scope| {
        let (control, cause) = (&control, &cause);
        let handles: Vec<_> = ports
            .into_iter()
            .zip(parts)
            .enumerate()
            .map(|(i, (port, part))| {
                let range = ranges[i];
                scope.spawn(move || {
                    let _finish = control.seats()[i].finish_on_drop();
                    let checker = part.map(|p| Checker::new(p, load.iodepth));
                    // Record the error while this worker's connection is still open. Closing the
                    // connection may make other workers fail.
                    let tell = |e| fail(e, control, cause);
                    let port = port().map_err(tell).ok()?;
                    let index = i as u16;
                    let mut worker =
                        Worker::new(port, Nobody, index, range, load, control, checker);
                    worker.run().map_err(tell).ok()
                })
            })
            .collect();
        if let Err(e) = watch.run(boss, progress) {
            fail(e, control, cause);
            while !control.all_finished() {
                boss.wake();
                thread::sleep(Duration::from_millis(1));
            }
        }
        handles
            .into_iter()
            .map(|h| h.join().unwrap_or(None))
            .collect::<Option<Vec<Measured>>>()
    })
    .map(|measured| Outcome {
        measured,
        ns_per_tick: 1e9 / clock.hz(),
        backend_cpu_ns: watch.backend_ns(),
    })
    .ok_or_else(|| cause.into_inner().unwrap_or(Error::Aborted))
}

/// Records `error` and ends the run. Only the first error is kept: the later ones may be its
/// consequences, such as a server that dies when a worker disconnects.
fn fail(error: Error, control: &Control, cause: &OnceLock<Error>) {
    if !matches!(error, Error::Aborted) {
        let _ = cause.set(error);
    }
    control.set_phase(Phase::Abort);
}

fn open_ledger(load: &Load, geometry: Geometry) -> Result<Option<Ledger>> {
    if !load.verify {
        return Ok(None);
    }
    let area = Area {
        block: load.bs,
        offset: load.offset,
        blocks: geometry.blocks,
    };
    Ok(Some(match &load.verify_state {
        Some(path) => Ledger::open(path, area)?,
        None => Ledger::in_memory(area)?,
    }))
}

/// State of the supervising thread.
struct Watch<'a> {
    load: &'a Load,
    control: &'a Control,
    start: Instant,
    backend_start: Option<ProcessCpu>,
    backend_end: Option<ProcessCpu>,
    /// Per worker: number of completions at the last change, and the time of that change.
    alive: Vec<(u64, Instant)>,
    shown: (u64, Instant),
}

impl<'a> Watch<'a> {
    fn new(load: &'a Load, control: &'a Control) -> Watch<'a> {
        let now = Instant::now();
        Watch {
            load,
            control,
            start: now,
            backend_start: None,
            backend_end: None,
            alive: vec![(0, now); control.seats().len()],
            shown: (0, now),
        }
    }

    fn run(
        &mut self,
        boss: &mut dyn Supervisor,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<()> {
        while !self.control.all_finished() {
            let time = self.advance(boss);
            self.show(progress);
            if boss.wait(time.min(TICK), self.control)? {
                self.forgive();
            }
            self.check_alive(boss)?;
        }
        // A short run may have ended between two checks.
        if self.backend_end.is_none() {
            self.backend_end = boss.backend_cpu();
        }
        Ok(())
    }

    /// Enters the next phase if it is due. Returns the time until the next phase.
    fn advance(&mut self, boss: &dyn Supervisor) -> Duration {
        let elapsed = self.start.elapsed();
        let end = self.load.runtime.map(|t| self.load.ramp + t);
        let stop = self.load.stop.load(Ordering::Relaxed);
        match self.control.phase() {
            Phase::Ramp | Phase::Measure if stop => self.enter(Phase::Stop, boss),
            Phase::Ramp if elapsed >= self.load.ramp => self.enter(Phase::Measure, boss),
            Phase::Ramp => return self.load.ramp - elapsed,
            Phase::Measure => match end {
                Some(end) if elapsed >= end => self.enter(Phase::Stop, boss),
                Some(end) => return end - elapsed,
                None => {}
            },
            Phase::Stop | Phase::Abort => boss.wake(),
        }
        if self.backend_end.is_none() && self.control.all_windows_closed() {
            self.backend_end = boss.backend_cpu();
        }
        TICK
    }

    fn enter(&mut self, phase: Phase, boss: &dyn Supervisor) {
        match phase {
            Phase::Measure => self.backend_start = boss.backend_cpu(),
            Phase::Stop => self.backend_end = boss.backend_cpu(),
            Phase::Ramp | Phase::Abort => {}
        }
        self.control.set_phase(phase);
        boss.wake();
    }

    fn show(&mut self, progress: &mut dyn FnMut(&Progress)) {
        let now = Instant::now();
        let since = now - self.shown.1;
        if since < PROGRESS {
            return;
        }
        let completed = self.control.completed();
        progress(&Progress {
            phase: self.control.phase(),
            elapsed: self.start.elapsed(),
            total: self.load.runtime.map(|t| self.load.ramp + t),
            completed,
            iops: (completed - self.shown.0) as f64 / since.as_secs_f64(),
        });
        self.shown = (completed, now);
    }

    fn forgive(&mut self) {
        let now = Instant::now();
        self.alive.iter_mut().for_each(|a| a.1 = now);
    }

    /// Returns an error if a worker has completed no request for longer than the timeout.
    fn check_alive(&mut self, boss: &dyn Supervisor) -> Result<()> {
        let now = Instant::now();
        for (i, seat) in self.control.seats().iter().enumerate() {
            let (completed, in_flight) = (seat.completed(), seat.in_flight());
            if self.alive[i].0 != completed || seat.is_finished() {
                self.alive[i] = (completed, now);
            } else if now - self.alive[i].1 > self.load.timeout {
                return Err(Error::Device {
                    queue: i,
                    what: format!(
                        "no request completed for {:?}, {in_flight} are in flight: {}",
                        self.load.timeout,
                        boss.diagnose(i, completed, in_flight)
                    ),
                });
            }
        }
        Ok(())
    }

    fn backend_ns(&self) -> Option<u64> {
        Some(
            self.backend_end
                .as_ref()?
                .since(self.backend_start.as_ref()?),
        )
    }
}
