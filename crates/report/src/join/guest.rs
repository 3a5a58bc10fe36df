//! The guest's side: its operations, their bios and requests in its block layer, its kicks and
//! its interrupts.

use std::collections::{HashMap, VecDeque};

use fathom_run::{Disk, Event, Kind};
use smallvec::SmallVec;

use super::requests::{Handler, Kick, Rq, Unit};
use super::survey::Survey;
use super::way::{Class, Key};
use super::window::Window;
use crate::clock::trips::GuestTrip;

/// Which of the guest's events are traced.
#[derive(Clone, Copy, Debug)]
struct Probes {
    benchmark: bool,
    bio: bool,
    /// The event used as the start of the interrupt handler.
    handler: Option<Kind>,
}

/// The state of the guest's side.
#[derive(Debug)]
pub(crate) struct Guest {
    probes: Probes,
    dev: Option<u64>,
    vqs: Vec<u64>,
    irqs: Vec<u64>,
    one_queue: bool,
    pub(crate) units: Window<Unit>,
    pub(crate) rqs: Window<Rq>,
    pub(crate) kicks: Window<Kick>,
    pub(crate) handlers: VecDeque<Handler>,
    /// Units with bytes that no request carries yet, oldest first.
    open: Vec<u64>,
    in_flight: HashMap<Key, SmallVec<[u64; 2]>>,
    /// Requests in the ring that no kick has announced.
    waiting: Vec<u64>,
    /// Completed requests that are not followed yet.
    pub(crate) completed: VecDeque<u64>,
    /// New units, for the joiner to schedule.
    pub(crate) fresh: Vec<u64>,
    hctx: HashMap<u32, u64>,
    queue_of_hctx: HashMap<u64, u16>,
    irq_of_cpu: HashMap<u16, u64>,
    /// Requests that belong to no operation.
    pub(crate) background: u64,
    /// Kicks without a request, completions without an issue, requests that never completed.
    pub(crate) inconsistent: u64,
    started: bool,
}

impl Guest {
    pub(crate) fn new(disk: Option<&Disk>, survey: &Survey) -> Guest {
        let handler = [
            Kind::VringInterrupt,
            Kind::VirtblkDone,
            Kind::IrqHandlerEntry,
        ];
        let irqs = disk.map_or(Vec::new(), |disk| disk.guest_irqs.clone());
        let usable = |&kind: &Kind| {
            survey.guest(kind) && (kind != Kind::IrqHandlerEntry || !irqs.is_empty())
        };
        let vqs = disk.map_or(Vec::new(), |disk| disk.guest_vqs.clone());
        let queues = disk.map_or(0, |disk| {
            vqs.len()
                .max(disk.doorbells.len())
                .max(disk.kick_eventfds.len())
        });
        let has_others = disk
            .is_some_and(|disk| disk.queues_unknown && vqs.is_empty() && disk.doorbells.is_empty());
        Guest {
            probes: Probes {
                benchmark: survey.guest(Kind::BenchOperation),
                bio: survey.guest(Kind::BlockBioQueue),
                handler: handler.into_iter().find(usable),
            },
            dev: survey.guest_dev,
            vqs,
            one_queue: queues <= 1 && !has_others,
            irqs,
            units: Window::default(),
            rqs: Window::default(),
            kicks: Window::default(),
            handlers: VecDeque::new(),
            open: Vec::new(),
            in_flight: HashMap::new(),
            waiting: Vec::new(),
            completed: VecDeque::new(),
            fresh: Vec::new(),
            hctx: HashMap::new(),
            queue_of_hctx: HashMap::new(),
            irq_of_cpu: HashMap::new(),
            background: 0,
            inconsistent: 0,
            started: false,
        }
    }

    /// Returns whether an event of the interrupt handler is traced.
    pub(crate) fn sees_handler(&self) -> bool {
        self.probes.handler.is_some()
    }

    /// Processes an event; `end` is the end of an operation.
    pub(crate) fn event(&mut self, at: i64, event: &Event, end: Option<i64>) {
        let args = &event.args;
        match event.kind {
            Kind::BenchOperation => self.operation(at, event, end),
            Kind::BlockBioQueue if self.is_part_of_disk(args[0]) => {
                self.bio(at, Key::sectors(args[3], args[1], args[2]), event.tid);
            }
            // A list of requests (count above 1) may span several queues.
            Kind::VirtioQueueRq if args[1] <= 1 => {
                self.hctx.insert(event.tid, args[0]);
            }
            Kind::BlockRqIssue if Some(args[0]) == self.dev => {
                self.issue(at, Key::sectors(args[3], args[1], args[2]), event.tid);
            }
            Kind::VirtqueueNotify => self.learn_queue(event.tid, args[0]),
            Kind::VpNotify => {
                self.learn_queue(event.tid, args[0]);
                self.kick(at, event);
            }
            Kind::BlockRqComplete if Some(args[0]) == self.dev => {
                self.complete(at, Key::sectors(args[3], args[1], args[2]));
            }
            Kind::IrqHandlerEntry => {
                self.irq_of_cpu.insert(event.cpu, args[0]);
                if self.probes.handler == Some(Kind::IrqHandlerEntry) {
                    self.handler(at, event, Some(args[0]), 0);
                }
            }
            Kind::VringInterrupt if self.probes.handler == Some(Kind::VringInterrupt) => {
                let irq = match args[0] {
                    0 => self.irq_of_cpu.get(&event.cpu).copied(),
                    irq => Some(irq),
                };
                self.handler(at, event, irq, args[1]);
            }
            Kind::VirtblkDone if self.probes.handler == Some(Kind::VirtblkDone) => {
                self.handler(at, event, None, args[0]);
            }
            _ => {}
        }
    }

    /// Returns whether `dev` is the disk or one of its partitions; a bio may name a partition.
    /// virtio-blk gives each disk 16 minor numbers.
    fn is_part_of_disk(&self, dev: u64) -> bool {
        self.dev.is_some_and(|disk| dev >> 4 == disk >> 4)
    }

    fn operation(&mut self, at: i64, event: &Event, end: Option<i64>) {
        let key = Key::new(event.args[4], event.args[1], event.args[2]);
        self.started = true;
        self.unit(key, Some(at), end, event.tid);
    }

    fn unit(&mut self, key: Key, call: Option<i64>, end: Option<i64>, tid: u32) -> u64 {
        let id = self.units.push(Unit {
            key,
            call,
            end,
            tid,
            bios: SmallVec::new(),
            todo: match key.class {
                Class::Flush => 1,
                _ => key.length,
            },
            open: 0,
            broken: false,
            ambiguous: false,
            last: None,
            kick: None,
        });
        self.open.push(id);
        self.fresh.push(id);
        id
    }

    fn bio(&mut self, at: i64, key: Key, tid: u32) {
        if !self.probes.benchmark {
            self.started = true;
            let id = self.unit(key, None, None, tid);
            if let Some(unit) = self.units.get_mut(id) {
                unit.bios.push((key, at));
            }
            return;
        }
        // Take the first operation that covers these bytes and has no bio for them. An operation of
        // the bio's own thread precedes another thread's.
        let mut found: SmallVec<[(bool, u64); 2]> = SmallVec::new();
        for &id in &self.open {
            let Some(unit) = self.units.get(id) else {
                continue;
            };
            let holds = unit.key.class == key.class
                && unit.key.offset <= key.offset
                && key.end() <= unit.key.end();
            if holds && unit.bios.iter().all(|(bio, _)| bio.common(&key) == 0) {
                found.push((unit.tid != tid, id));
            }
        }
        let Some(&(other, id)) = found.iter().min() else {
            return;
        };
        let rivals = found.iter().filter(|(o, _)| *o == other).count() > 1;
        if let Some(unit) = self.units.get_mut(id) {
            unit.bios.push((key, at));
            // A thread's bios come in the order of its calls.
            unit.ambiguous |= rivals && other;
        }
    }

    fn issue(&mut self, at: i64, key: Key, tid: u32) {
        let hctx = self.hctx.remove(&tid).filter(|&hctx| hctx != 0);
        let queue = hctx.and_then(|hctx| self.queue_of_hctx.get(&hctx).copied());
        if !self.probes.benchmark && !self.probes.bio {
            self.started = true;
            let id = self.unit(key, None, None, tid);
            if let Some(unit) = self.units.get_mut(id) {
                unit.call = None;
            }
        }
        let (mut units, mut ambiguous) = self.take_on(key);
        if units.is_empty() && key.class == Class::Flush {
            units = self.share_flush(key);
            ambiguous = true;
        }
        if units.is_empty() {
            // The ring was full, so the block layer issues the same request to the driver again.
            let again = self.in_flight.get(&key).and_then(|ids| ids.last());
            if let Some(rq) = again.and_then(|&id| self.rqs.get_mut(id)) {
                if rq.kick.is_none() {
                    rq.issue = at;
                }
                return;
            }
            self.background += u64::from(self.started);
        }
        let id = self.rqs.push(Rq {
            key,
            issue: at,
            complete: None,
            tid,
            hctx,
            queue: if self.one_queue { Some(0) } else { queue },
            kick: None,
            own_kick: false,
            units,
            ambiguous,
        });
        let same = self.in_flight.entry(key).or_default();
        same.push(id);
        if same.len() > 1 {
            for &id in same.iter() {
                if let Some(rq) = self.rqs.get_mut(id) {
                    rq.ambiguous = true;
                }
            }
        }
        self.waiting.push(id);
    }

    /// Returns the units whose bytes a request carries, first come, first served, and whether the
    /// request could belong to other units.
    fn take_on(&mut self, key: Key) -> (SmallVec<[u64; 1]>, bool) {
        let mut taken: SmallVec<[(u64, Key); 2]> = SmallVec::new();
        let mut ambiguous = false;
        for &id in &self.open {
            let Some(unit) = self.units.get_mut(id) else {
                continue;
            };
            let common = unit.key.common(&key);
            // Where bios are traced, a request cannot carry bytes that have not reached the block
            // layer.
            if common == 0 || (self.probes.bio && unit.bios.is_empty() && unit.call.is_none()) {
                continue;
            }
            let rival = |(_, other): &(u64, Key)| other.common(&unit.key) > 0;
            if taken.iter().any(rival) {
                ambiguous = true;
                if key.class != Class::Flush {
                    continue;
                }
            }
            unit.todo = unit.todo.saturating_sub(common);
            unit.open += 1;
            taken.push((id, unit.key));
        }
        let units = &self.units;
        self.open
            .retain(|&id| units.get(id).is_some_and(|unit| unit.todo > 0));
        (taken.iter().map(|&(id, _)| id).collect(), ambiguous)
    }

    /// Moves the units of a shared flush request to a second one. The kernel lets waiting flushes
    /// share one request. A second request while the first is in flight shows that they did not
    /// share it. The second request gets all units of the first except one.
    fn share_flush(&mut self, key: Key) -> SmallVec<[u64; 1]> {
        let newest = self.in_flight.get(&key).and_then(|ids| ids.last());
        let newest = newest.and_then(|&id| self.rqs.get_mut(id));
        match newest.filter(|rq| rq.units.len() > 1) {
            Some(rq) => rq.units.drain(1..).collect(),
            None => SmallVec::new(),
        }
    }

    /// Returns the queue of a virtqueue's address, None if the queue is unknown, or Err if the
    /// virtqueue belongs to another device.
    fn queue_of(&self, vq: u64) -> Result<Option<u16>, ()> {
        match self.vqs.iter().position(|&known| known == vq) {
            Some(queue) => Ok(u16::try_from(queue).ok()),
            None if vq == 0 || self.vqs.is_empty() => Ok(self.one_queue.then_some(0)),
            None => Err(()),
        }
    }

    /// Assigns a queue to the thread's waiting requests. A thread that puts requests into a ring
    /// notifies that ring before it does anything else.
    fn learn_queue(&mut self, tid: u32, vq: u64) {
        let Ok(Some(queue)) = self.queue_of(vq) else {
            return;
        };
        for &id in &self.waiting {
            if let Some(rq) = self.rqs.get_mut(id)
                && rq.tid == tid
                && rq.queue.is_none()
            {
                rq.queue = Some(queue);
                if let Some(hctx) = rq.hctx {
                    self.queue_of_hctx.insert(hctx, queue);
                }
            }
        }
    }

    fn kick(&mut self, at: i64, event: &Event) {
        let Ok(queue) = self.queue_of(event.args[0]) else {
            return;
        };
        let id = self.kicks.push(Kick {
            at,
            queue,
            cpu: event.cpu,
            members: 0,
            settled: 0,
            polled: 0,
            doorbell: None,
            ways: Vec::new(),
        });
        let (mut members, mut newest) = (0, None);
        let rqs = &mut self.rqs;
        self.waiting.retain(|&waiting| {
            let Some(rq) = rqs.get_mut(waiting) else {
                return false;
            };
            let known = queue.is_some() && rq.queue.is_some();
            let brings = if known {
                queue == rq.queue
            } else {
                rq.tid == event.tid
            };
            if brings {
                rq.kick = Some(id);
                members += 1;
                newest = Some(waiting);
            }
            !brings
        });
        if let Some(rq) = newest.and_then(|id| self.rqs.get_mut(id)) {
            rq.own_kick = true;
        }
        if members == 0 {
            self.kicks.remove(id);
            let ours = self.vqs.contains(&event.args[0]);
            self.inconsistent += u64::from(ours && self.started);
        } else if let Some(kick) = self.kicks.get_mut(id) {
            kick.members = members;
        }
    }

    fn handler(&mut self, at: i64, event: &Event, irq: Option<u64>, vq: u64) {
        let by_irq = irq.and_then(|irq| self.irqs.iter().position(|&known| known == irq));
        let queue = match (by_irq, self.queue_of(vq)) {
            (_, Err(())) => return,
            (Some(queue), _) => u16::try_from(queue).ok(),
            (None, Ok(Some(queue))) if vq != 0 && !self.vqs.is_empty() => Some(queue),
            (None, Ok(_)) if irq.is_some() && !self.irqs.is_empty() => return,
            (None, Ok(queue)) => queue,
        };
        self.handlers.push_back(Handler {
            at,
            cpu: event.cpu,
            queue,
        });
    }

    fn complete(&mut self, at: i64, key: Key) {
        let Some(id) = self.completes(key) else {
            self.inconsistent += u64::from(self.started);
            return;
        };
        if let Some(rq) = self.rqs.get_mut(id) {
            rq.complete = Some(at);
            self.completed.push_back(id);
        }
    }

    /// Returns the request that completes; the first issued, if several have the same key.
    fn completes(&mut self, key: Key) -> Option<u64> {
        let ids = self.in_flight.get_mut(&key)?;
        let id = ids.remove(0);
        if ids.is_empty() {
            self.in_flight.remove(&key);
        }
        self.waiting.retain(|&waiting| waiting != id);
        Some(id)
    }

    /// Removes a unit that no request will complete any more.
    pub(crate) fn forget(&mut self, id: u64) -> Option<Unit> {
        self.open.retain(|&open| open != id);
        self.units.remove(id)
    }

    /// Removes a completed request and returns its times as the guest alone sees them.
    pub(crate) fn trip(&mut self, id: u64) -> Option<GuestTrip> {
        let rq = self.rqs.remove(id)?;
        for &unit in &rq.units {
            self.forget(unit);
        }
        let handler = self.handlers.back().map(|handler| handler.at);
        Some(GuestTrip {
            key: rq.key,
            issue: rq.issue,
            complete: rq.complete?,
            kick: rq.kick.and_then(|id| Some(self.kicks.get(id)?.at)),
            handler: handler.filter(|&at| at >= rq.issue),
        })
    }

    /// Drops kicks and handlers from before `at`; for callers that only take trips.
    pub(crate) fn clear(&mut self, at: i64) {
        while self.handlers.front().is_some_and(|handler| handler.at < at) {
            self.handlers.pop_front();
        }
        while let Some((id, kick)) = self.kicks.oldest()
            && kick.at < at
        {
            self.kicks.remove(id);
        }
    }

    /// Drops requests that were issued before `at` and never completed. The joiner has not followed
    /// completed requests yet.
    pub(crate) fn expire(&mut self, at: i64) {
        while let Some((id, rq)) = self.rqs.oldest()
            && rq.issue < at
            && rq.complete.is_none()
        {
            self.drop_rq(id);
            self.inconsistent += u64::from(self.started);
        }
    }

    /// Removes the requests that are in flight when the recording ends, and returns them.
    pub(crate) fn drop_in_flight(&mut self) -> Vec<Rq> {
        let ids: Vec<u64> = self.in_flight.values().flatten().copied().collect();
        let dropped: Vec<Rq> = ids.into_iter().filter_map(|id| self.drop_rq(id)).collect();
        if self.started {
            let alone = dropped.iter().filter(|rq| rq.units.is_empty()).count();
            self.background = self.background.saturating_sub(alone as u64);
        }
        dropped
    }

    /// Removes a request that will not be followed; its units are broken.
    fn drop_rq(&mut self, id: u64) -> Option<Rq> {
        let rq = self.rqs.remove(id)?;
        for &unit in &rq.units {
            if let Some(unit) = self.units.get_mut(unit) {
                unit.broken = true;
            }
        }
        if let Some(ids) = self.in_flight.get_mut(&rq.key) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.in_flight.remove(&rq.key);
            }
        }
        self.waiting.retain(|&waiting| waiting != id);
        Some(rq)
    }
}
