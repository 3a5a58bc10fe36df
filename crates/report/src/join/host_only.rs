//! Joins runs without guest events. Requests come from the server's records, the host's block
//! layer or KVM's doorbells, and are followed from the kick to the interrupt.

use std::collections::VecDeque;

use super::blocks::Blocks;
use super::doorbell::{Doorbell, Interrupt};
use super::requests::compatible;
use super::server::Record;
use super::way::{Class, Key, Way};
use super::{END, Joiner, PATIENCE};
use crate::analysis::{Delivery, HostClass, Point};

/// The source of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Teller {
    Fathom,
    Blocks,
    Doorbells,
}

/// A request that is followed once all events around it have been read.
#[derive(Debug)]
enum Pending {
    Record(Record),
    /// A request of the host's block layer: its key, issue time, issuer and end.
    Block(Key, i64, u32, i64),
    Doorbell(u64, i64),
}

/// Requests that are not followed yet.
#[derive(Debug)]
pub(crate) struct HostOnly {
    teller: Teller,
    /// Requests as (end, request), in order of their ends.
    pending: VecDeque<(i64, Pending)>,
    number: u64,
    /// Number of requests by (queue, wake), newest last.
    wakes: VecDeque<(u16, i64, u32)>,
    /// When the server published completed requests: (queue, time) of each batch.
    used: VecDeque<(u16, i64)>,
    /// Completions of the host's block layer.
    done: VecDeque<i64>,
}

impl HostOnly {
    pub(crate) fn new(fathom: bool, blocks: bool) -> HostOnly {
        HostOnly {
            teller: match (fathom, blocks) {
                (true, _) => Teller::Fathom,
                (false, true) => Teller::Blocks,
                (false, false) => Teller::Doorbells,
            },
            pending: VecDeque::new(),
            number: 0,
            wakes: VecDeque::new(),
            used: VecDeque::new(),
            done: VecDeque::new(),
        }
    }

    pub(crate) fn record(&mut self, record: Record) {
        if !record.polled {
            let (queue, wake) = (record.queue, record.wake);
            let known = self.wakes.iter_mut().rev().take(64);
            match known
                .into_iter()
                .find(|(q, at, _)| *q == queue && *at == wake)
            {
                Some((_, _, count)) => *count += 1,
                None => self.wakes.push_back((queue, wake, 1)),
            }
        }
        let batch = (record.queue, record.used);
        if !self.used.iter().rev().take(64).any(|known| *known == batch) {
            self.used.push_back(batch);
        }
        self.schedule(record.end, Pending::Record(record));
    }

    pub(crate) fn completed(&mut self, at: i64, blocks: &Blocks) {
        if self.teller == Teller::Blocks
            && let Some((key, issue, issuer)) = blocks.just_completed()
        {
            self.done.push_back(at);
            self.schedule(at, Pending::Block(key, issue, issuer, at));
        }
    }

    pub(crate) fn rung(&mut self, id: u64, doorbell: &Doorbell) {
        if self.teller == Teller::Doorbells {
            self.schedule(doorbell.at(), Pending::Doorbell(id, doorbell.at()));
        }
    }

    fn schedule(&mut self, end: i64, pending: Pending) {
        let at = self.pending.partition_point(|(other, _)| *other <= end);
        self.pending.insert(at, (end, pending));
    }

    /// Returns the number of requests that the record's wake brought.
    fn batch(&self, record: &Record) -> u32 {
        let found = self
            .wakes
            .iter()
            .rev()
            .find(|(q, at, _)| *q == record.queue && *at == record.wake);
        found.map_or(0, |&(_, _, count)| count)
    }

    /// Drops wakes, batches and completions before `at`.
    pub(crate) fn prune(&mut self, at: i64) {
        while self.wakes.front().is_some_and(|&(_, wake, _)| wake < at) {
            self.wakes.pop_front();
        }
        while self.used.front().is_some_and(|&(_, used)| used < at) {
            self.used.pop_front();
        }
        while self.done.front().is_some_and(|&done| done < at) {
            self.done.pop_front();
        }
    }

    /// Returns the start of the earliest request that is not followed yet.
    pub(crate) fn oldest(&self) -> Option<i64> {
        let start = |pending: &Pending| match pending {
            Pending::Record(record) => record.wake,
            Pending::Block(_, issue, ..) => *issue,
            Pending::Doorbell(_, at) => *at,
        };
        self.pending.iter().map(|(_, pending)| start(pending)).min()
    }
}

impl Joiner<'_> {
    /// Follows the requests that ended by `due`.
    pub(super) fn settle_host(&mut self, due: i64) {
        while self.is_next_ended(due)
            && let Some(host) = &mut self.host_only
        {
            let Some((_, pending)) = host.pending.pop_front() else {
                return;
            };
            let number = host.number;
            host.number += 1;
            self.counts.requests += 1;
            let way = match pending {
                Pending::Record(record) => {
                    let (way, is_whole) = self.follow_record(&record);
                    if !is_whole {
                        self.counts.requests -= 1;
                        continue;
                    }
                    Some(way)
                }
                Pending::Block(key, issue, issuer, complete) => {
                    Some(self.follow_block(key, (issue, issuer), complete))
                }
                Pending::Doorbell(id, at) => {
                    let way = self.follow_doorbell(id);
                    if way.is_none() && self.now == END {
                        self.in_flight.push(at);
                        self.counts.requests -= 1;
                        continue;
                    }
                    way
                }
            };
            match way {
                Some(mut way) => {
                    way.number = number;
                    way.violations += way.misordered(self.errors);
                    (self.sink)(way);
                }
                None => self.counts.unmatched += 1,
            }
        }
    }

    /// Returns whether the next request ended by `due`. A request that only its doorbell shows ends
    /// with its interrupt.
    fn is_next_ended(&self, due: i64) -> bool {
        let next = self
            .host_only
            .as_ref()
            .and_then(|host| host.pending.front());
        match next {
            Some(&(at, Pending::Doorbell(id, _))) => {
                let doorbell = self.kvm.doorbells.get(id);
                let sent = |rung: &Doorbell| self.kvm.interrupt_from(rung.queue, rung.at());
                let is_over = !self.probes.interrupt || self.now.saturating_sub(at) > PATIENCE;
                at <= due && (is_over || doorbell.and_then(sent).is_some())
            }
            Some(&(end, _)) => end <= due,
            None => false,
        }
    }

    /// Follows a server's record. Returns false if its remote part may lie outside the recording.
    fn follow_record(&mut self, record: &Record) -> (Way, bool) {
        let mut way = Way::new(record.key);
        way.points.set(Point::Wake, record.wake);
        way.set_record(record);
        if record.polled {
            way.delivery = Delivery::Polled;
            way.points.put(Point::Wake, None);
        } else {
            way.batch = self.host_only.as_ref().map_or(0, |host| host.batch(record));
            way.delivery = match way.batch {
                1 => Delivery::Kicked,
                _ => Delivery::Batched,
            };
            // Take the first doorbell since the server's previous wake; with several, the request
            // may be another's.
            let since = record.previous_wake;
            let doorbells = self.kvm.doorbells.iter().map(|(_, doorbell)| *doorbell);
            let mut rung = doorbells.filter(|doorbell| {
                let signal = doorbell.signal().unwrap_or(doorbell.at());
                compatible(doorbell.queue, Some(record.queue))
                    && signal > since
                    && doorbell.at() <= record.wake
            });
            match rung.next() {
                Some(doorbell) => way.set_doorbell(&doorbell),
                None => way.incomplete |= self.probes.doorbell,
            }
            way.ambiguous |= rung.next().is_some();
        }
        let below = self.blocks.below(&record.key, record.device, record.result);
        way.set_below(&below);
        let is_whole = self.cross(&mut way, record);
        let sent = self.sent_for(record, END);
        way.points.put(Point::Interrupt, sent.map(|sent| sent.at));
        // The kernel sends the interrupts of several batches later.
        way.ambiguous |= sent.is_some_and(|sent| {
            self.kvm.is_server(sent.tid) == Some(false) && self.batches(record.queue, &sent) > 1
        });
        (way, is_whole)
    }

    /// Returns the number of batches that a queue's interrupt may be for.
    fn batches(&self, queue: u16, sent: &Interrupt) -> usize {
        let before = self
            .kvm
            .interrupt_before(Some(queue), i64::MIN, sent.at.saturating_sub(1));
        let since = before.map_or(i64::MIN, |before| before.at);
        let used = self.host_only.iter().flat_map(|host| &host.used);
        used.filter(|&&(of, used)| of == queue && used > since && used <= sent.at)
            .count()
    }

    fn follow_block(&mut self, key: Key, (issue, issuer): (i64, u32), complete: i64) -> Way {
        let mut way = Way::new(key);
        way.host = HostClass::Direct;
        way.points.set(Point::HostIssue, issue);
        way.points.set(Point::HostComplete, complete);
        let before = |doorbell: &Doorbell| doorbell.at() <= issue;
        let mut doorbells = self.kvm.doorbells.iter().rev().map(|(_, one)| *one);
        let rung = doorbells.find(before);
        if let Some(doorbell) = rung {
            way.set_doorbell(&doorbell);
        }
        let sent = self.kvm.interrupt_from(None, complete).copied();
        way.points.put(Point::Interrupt, sent.map(|sent| sent.at));
        let rung = rung.map(|doorbell| doorbell.at());
        way.ambiguous = !self.is_alone(rung, complete, sent.map(|sent| sent.at));
        way.incomplete |= self.probes.interrupt && sent.is_none();
        self.serve(&mut way, Some(issuer), sent);
        way
    }

    /// Returns whether the doorbell and the interrupt around a host request can be no other
    /// request's: between the interrupts before and after the request, there is one doorbell and
    /// one completion.
    fn is_alone(&self, rung: Option<i64>, complete: i64, sent: Option<i64>) -> bool {
        let last = |to| self.kvm.interrupt_before(None, i64::MIN, to);
        let before = |to| last(to).map_or(i64::MIN, |before| before.at);
        let until = sent.unwrap_or(complete);
        let since = before(until.saturating_sub(1));
        let done = self.host_only.iter().flat_map(|host| &host.done);
        let done = done.filter(|&&done| done > since && done <= until).count();
        let is_interrupt_own = sent.is_none() || done == 1;
        let is_doorbell_own = rung.is_none_or(|rung| {
            since < rung && self.kvm.doorbells_within(None, before(rung), until) == 1
        });
        is_interrupt_own && is_doorbell_own
    }

    fn follow_doorbell(&mut self, id: u64) -> Option<Way> {
        let doorbell = *self.kvm.doorbells.get(id)?;
        let mut way = Way::new(Key {
            class: Class::Any,
            offset: 0,
            length: 0,
        });
        way.delivery = Delivery::Kicked;
        way.set_doorbell(&doorbell);
        let (queue, rung) = (doorbell.queue, doorbell.at());
        let sent = self.kvm.interrupt_from(queue, rung)?.at;
        way.points.set(Point::Interrupt, sent);
        let before = self.kvm.interrupt_before(queue, i64::MIN, rung);
        let since = before.map_or(i64::MIN, |before| before.at);
        way.ambiguous = self.kvm.doorbells_within(queue, since, sent) > 1;
        Some(way)
    }
}
