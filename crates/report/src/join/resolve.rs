//! Follows one guest request: finds everything that belongs to it.

use super::Joiner;
use super::blocks::Below;
use super::doorbell::{Doorbell, Interrupt};
use super::requests::{Handler, Kick, Rq, compatible};
use super::server::Record;
use super::serving::Frame;
use super::way::{Key, Points, Way};
use crate::analysis::{Delivery, HostClass, Point};

/// Time in ns within which a kick reaches the server, for a kick whose doorbell was not seen.
const ON_ITS_WAY: i64 = 1_000_000;

/// Shortest time in ns between an interrupt and its handler.
const SHORTEST_WAY: i64 = 200;

impl Way {
    /// Creates a way without any points.
    pub(super) fn new(key: Key) -> Way {
        Way {
            number: 0,
            key,
            points: Points::default(),
            delivery: Delivery::Unknown,
            batch: 0,
            host: HostClass::Unknown,
            reaped: false,
            ambiguous: false,
            incomplete: false,
            told_late: false,
            violations: 0,
        }
    }

    pub(super) fn set_record(&mut self, record: &Record) {
        self.points.set(Point::Pop, record.pop);
        self.points.set(Point::Map, record.map);
        self.points.set(Point::Device, record.device);
        self.points.set(Point::Result, record.result);
        self.points.set(Point::Used, record.used);
    }

    pub(super) fn set_doorbell(&mut self, doorbell: &Doorbell) {
        self.points.put(Point::Exit, doorbell.exit);
        self.points.put(Point::Signal, doorbell.signal());
    }

    pub(super) fn set_below(&mut self, below: &Below) {
        self.host = below.class;
        self.ambiguous |= below.ambiguous;
        self.incomplete |= below.incomplete;
        self.points.put(Point::HostIssue, below.issue);
        self.points.put(Point::HostComplete, below.complete);
    }
}

impl Joiner<'_> {
    /// Follows a completed guest request. Returns None if it has no counterpart.
    pub(super) fn follow(&mut self, rq: &Rq) -> Option<Way> {
        let complete = rq.complete?;
        let mut way = Way::new(rq.key);
        way.ambiguous = rq.ambiguous;
        way.points.set(Point::Issue, rq.issue);
        way.points.set(Point::Complete, complete);
        let around = (rq.issue - self.error, complete + self.error);
        let mut record = None;
        if self.probes.fathom {
            let (found, several) = self.records.take(rq.key, around.0, around.1)?;
            way.ambiguous |= several;
            way.set_record(&found);
            record = Some(found);
        }
        let queue = record.map(|record| record.queue).or(rq.queue);
        self.deliver(&mut way, rq, record.as_ref());
        let (from, to) = record.map_or(around, |record| (record.device, record.result));
        let below = self.blocks.below(&rq.key, from, to);
        way.set_below(&below);
        match record {
            Some(record) => {
                self.cross(&mut way, &record);
                self.interrupt_of_record(&mut way, &record, rq.issue, complete);
            }
            None => {
                let sent = self.interrupt_by_order(&mut way, queue, rq.issue, complete);
                self.serve(&mut way, below.issuer, sent);
            }
        }
        self.count_violations(&mut way, rq);
        Some(way)
    }

    /// Finds out how the server learnt of the request.
    fn deliver(&mut self, way: &mut Way, rq: &Rq, record: Option<&Record>) {
        let kick = rq.kick.and_then(|id| self.guest.kicks.get(id));
        let doorbell = kick
            .and_then(|kick| kick.doorbell)
            .and_then(|id| self.kvm.doorbells.get(id))
            .copied();
        if record.is_some_and(|record| self.was_polled(record, kick, doorbell.as_ref())) {
            way.delivery = Delivery::Polled;
            return;
        }
        let Some(kick) = kick else {
            self.deliver_without_kick(way, rq, record);
            return;
        };
        way.delivery = match rq.own_kick {
            true => Delivery::Kicked,
            false => Delivery::Batched,
        };
        way.points.set(Point::Kick, kick.at);
        match &doorbell {
            Some(doorbell) => {
                way.set_doorbell(doorbell);
                way.incomplete |= self.probes.exit && doorbell.exit.is_none();
                let signalled = doorbell.is_signalled() || doorbell.userspace;
                way.incomplete |= self.probes.signal && !signalled;
            }
            None => way.incomplete |= self.probes.doorbell,
        }
        let wake = record.map(|record| record.wake);
        // If the doorbell's event follows the signal, the signal may also follow the wake.
        let late = doorbell.filter(Doorbell::is_told_late);
        way.told_late = late.is_some();
        let signal = late.and_then(|doorbell| doorbell.signal());
        way.ambiguous |= wake.is_some() && signal > wake;
        way.points.put(Point::Wake, wake);
    }

    /// Returns whether the server polled: its record has that flag, or the server woke before the
    /// kick could arrive.
    fn was_polled(
        &self,
        record: &Record,
        kick: Option<&Kick>,
        doorbell: Option<&Doorbell>,
    ) -> bool {
        if record.polled {
            return true;
        }
        match (doorbell, kick) {
            (Some(doorbell), _) => {
                // A late event says nothing: its signal may have reached the server earlier.
                let signal = doorbell.signal().filter(|_| !doorbell.is_told_late());
                record.wake < signal.or(doorbell.exit).unwrap_or(i64::MIN)
            }
            (None, Some(kick)) => record.wake < kick.at - self.error,
            (None, None) => false,
        }
    }

    /// Sets the delivery of a request that no kick announced. Either an earlier kick woke the
    /// server in time, or the kick's event is missing.
    fn deliver_without_kick(&mut self, way: &mut Way, rq: &Rq, record: Option<&Record>) {
        let Some(record) = record else {
            if self.probes.kick {
                way.delivery = Delivery::Polled;
            }
            return;
        };
        let orphan = self.kvm.doorbells.iter().find(|(_, doorbell)| {
            !doorbell.linked
                && compatible(doorbell.queue, Some(record.queue))
                && doorbell.at() >= rq.issue - self.error
                && doorbell.at() <= record.wake
        });
        if let Some((id, &doorbell)) = orphan {
            way.set_doorbell(&doorbell);
            way.points.set(Point::Wake, record.wake);
            way.incomplete |= self.probes.kick;
            if let Some(doorbell) = self.kvm.doorbells.get_mut(id) {
                doorbell.linked = true;
            }
            return;
        }
        if self.is_woken_by_another(record) {
            way.delivery = Delivery::Polled;
        } else {
            way.points.set(Point::Wake, record.wake);
            way.incomplete |= self.probes.kick;
        }
    }

    /// Returns whether an earlier kick may have caused this wake: its signal reached the server
    /// after the previous wake.
    fn is_woken_by_another(&self, record: &Record) -> bool {
        self.guest.kicks.iter().any(|(_, kick)| {
            let doorbell = kick.doorbell.and_then(|id| self.kvm.doorbells.get(id));
            let (signal, on_its_way) = match doorbell {
                Some(doorbell) => (doorbell.signal().unwrap_or(doorbell.at()), 0),
                None => (kick.at, ON_ITS_WAY + self.error),
            };
            compatible(kick.queue, Some(record.queue))
                && signal > record.previous_wake.saturating_sub(on_its_way)
                && signal <= record.wake.saturating_add(self.error)
        })
    }

    /// Returns the first handler within `from..=to`.
    fn handler_from(&self, queue: Option<u16>, from: i64, to: i64) -> Option<Handler> {
        let handlers = &self.guest.handlers;
        let start = handlers.partition_point(|handler| handler.at < from);
        let mut rest = handlers.range(start..).take_while(|h| h.at <= to);
        rest.find(|h| compatible(h.queue, queue)).copied()
    }

    /// Returns the last handler within `from..=to`.
    fn handler_before(&self, queue: Option<u16>, from: i64, to: i64) -> Option<Handler> {
        let handlers = &self.guest.handlers;
        let end = handlers.partition_point(|handler| handler.at <= to);
        let mut rest = handlers.range(..end).rev().take_while(|h| h.at >= from);
        rest.find(|h| compatible(h.queue, queue)).copied()
    }

    /// Returns the handler that an effect at `at` led to. If the clocks may differ by more than an
    /// interrupt takes to its handler, a handler shortly before `at` is accepted.
    fn handler_of(&self, queue: Option<u16>, at: i64, to: i64) -> Option<Handler> {
        let early = (self.error - SHORTEST_WAY).max(0);
        let before = || self.handler_before(queue, at - early, at.min(to));
        self.handler_from(queue, at, to)
            .or_else(|| before().filter(|_| early > 0))
    }

    /// Returns the interrupt that the server sent after this record's batch, if any.
    pub(super) fn sent_for(&self, record: &Record, complete: i64) -> Option<Interrupt> {
        let first = self
            .kvm
            .interrupt_from(Some(record.queue), record.used)
            .copied()?;
        let by_kernel = self.kvm.is_server(first.tid) == Some(false);
        let until = match by_kernel {
            true => complete + self.error, // a kernel work item sends the interrupt later
            false => record.end,
        };
        (first.at <= until).then_some(first)
    }

    fn interrupt_of_record(&self, way: &mut Way, record: &Record, issue: i64, complete: i64) {
        let queue = Some(record.queue);
        if self.probes.interrupt
            && let Some(sent) = self.sent_for(record, complete)
        {
            self.interrupted(way, queue, &sent, complete);
            return;
        }
        if !self.guest.sees_handler() {
            return;
        }
        let Some(handler) = self.handler_of(queue, record.used, complete) else {
            way.reaped = true;
            // On one vCPU, a handler that was already running began after the request was issued.
            let running = self.handler_before(queue, issue, record.used);
            way.incomplete |= running.is_none();
            return;
        };
        if !self.probes.interrupt {
            way.points.set(Point::Handler, handler.at);
            return;
        }
        let before = self.handler_before(queue, i64::MIN, handler.at - 1);
        let since = before.map_or(i64::MIN, |before| before.at);
        let raised = self
            .kvm
            .interrupt_before(queue, since, handler.at + self.error);
        match raised {
            // The interrupt was sent for an earlier request, and its handler served both.
            Some(raised) if raised.at <= record.used => {
                way.points.set(Point::Handler, handler.at);
            }
            // The interrupt was sent for a later request: a running handler had taken this one.
            Some(_) => {
                way.reaped = true;
                way.ambiguous = true;
            }
            None => {
                way.points.set(Point::Handler, handler.at);
                way.incomplete = true;
            }
        }
    }

    /// Sets the points that the server's system calls show, for a server without its own stamps.
    pub(super) fn serve(&self, way: &mut Way, issuer: Option<u32>, sent: Option<Interrupt>) {
        let (Some(issue), Some(issuer)) = (way.points.get(Point::HostIssue), issuer) else {
            return;
        };
        // An interrupt that reached no handler of the guest is not this request's.
        let sent = sent.filter(|sent| way.points.get(Point::Interrupt) == Some(sent.at));
        let served = self.serving.tell(&Frame {
            signal: way.points.get(Point::Signal).filter(|_| !way.told_late),
            issue,
            complete: way.points.get(Point::HostComplete),
            issuer,
            interrupt: sent.map(|sent| (sent.at, self.kvm.taker(&sent))),
        });
        way.points.put(Point::Wake, served.wake);
        way.points.put(Point::Device, served.device);
        way.points.put(Point::Result, served.result);
    }

    /// Finds the request's interrupt without the server's records, from the host's block layer and
    /// the guest's handlers. Returns that interrupt.
    fn interrupt_by_order(
        &self,
        way: &mut Way,
        queue: Option<u16>,
        issue: i64,
        complete: i64,
    ) -> Option<Interrupt> {
        let done = way.points.get(Point::HostComplete);
        let handler = self.handler_before(queue, issue, complete);
        let sent = match (done, handler) {
            (Some(done), _) => self.kvm.interrupt_from(queue, done),
            (None, Some(handler)) => {
                let before = self.handler_before(queue, i64::MIN, handler.at - 1);
                let since = before.map_or(issue, |before| before.at.max(issue)) - self.error;
                self.kvm
                    .interrupt_before(queue, since, handler.at + self.error)
            }
            (None, None) => {
                self.kvm
                    .interrupt_before(queue, issue - self.error, complete + self.error)
            }
        };
        let sent = sent
            .filter(|sent| sent.at <= complete + self.error)
            .copied();
        match (sent, handler) {
            (Some(sent), _) => self.interrupted(way, queue, &sent, complete),
            (None, Some(handler)) => {
                way.points.set(Point::Handler, handler.at);
                way.incomplete |= self.probes.interrupt && done.is_none_or(|at| at < handler.at);
            }
            (None, None) => way.incomplete |= self.probes.interrupt || self.guest.sees_handler(),
        }
        sent
    }

    fn interrupted(&self, way: &mut Way, queue: Option<u16>, sent: &Interrupt, complete: i64) {
        if !self.guest.sees_handler() {
            way.points.set(Point::Interrupt, sent.at);
            return;
        }
        let Some(handler) = self.handler_of(queue, sent.at, complete) else {
            // Either a running handler took the request, and the interrupt's own handler runs
            // later, or the handler's event is missing.
            let next = self.handler_from(queue, sent.at, i64::MAX);
            let later = next.and_then(|next| {
                self.kvm
                    .interrupt_before(queue, complete.max(sent.at), next.at)
            });
            way.reaped = next.is_some() && later.is_none();
            if !way.reaped {
                way.points.set(Point::Interrupt, sent.at);
                way.incomplete = true;
            }
            return;
        };
        way.points.set(Point::Interrupt, sent.at);
        way.points.set(Point::Handler, handler.at);
        if let Ok(entry) = self.kvm.entry_after(u32::from(handler.cpu), sent.at) {
            way.points.put(Point::Entry, entry);
            let woken = |entry| {
                self.kvm
                    .woken_between(u32::from(handler.cpu), sent.at, entry)
            };
            way.points.put(Point::Woken, entry.and_then(woken));
        }
    }

    /// Counts a violation if the request's vCPU kicked while it was outside the guest.
    fn count_violations(&self, way: &mut Way, rq: &Rq) {
        let kick = rq.kick.and_then(|id| self.guest.kicks.get(id));
        if let Some(kick) = kick.filter(|_| way.points.get(Point::Kick).is_some()) {
            let cpu = u32::from(kick.cpu);
            let inside = self.kvm.was_inside(cpu, kick.at, self.error);
            way.violations += u32::from(inside == Some(false));
        }
    }
}
