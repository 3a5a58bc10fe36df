//! The exact join: follows each guest request through all layers.
//!
//! The join merges the round's streams by time and reads them once. Each side keeps its recent
//! events. The guest ([`guest`]) keeps its operations, bios, requests, kicks and handlers. KVM
//! ([`kvm`]) keeps doorbells, interrupts and the vCPUs' windows. The server ([`server`]) keeps
//! its records, and the host's block layer ([`blocks`]) keeps its requests. A request is followed
//! ([`resolve`]) a fixed time after its completion, when all its events have been read. Memory is
//! bounded by the requests in flight and the events of that time.
//!
//! The join guesses nothing. A request without a counterpart is unmatched. A request with several
//! possible counterparts is ambiguous. A request that lacks a watched point is incomplete. Events
//! that contradict others are inconsistent. The report shows the count of each of the four.

mod blocks;
mod doorbell;
mod guest;
mod host_only;
mod kvm;
mod lanes;
pub(crate) mod merge;
mod remote;
mod requests;
mod resolve;
mod server;
mod serving;
mod share;
pub(crate) mod sums;
pub(crate) mod survey;
pub(crate) mod way;
mod window;

/// Parts of the join that other readers of the streams share.
pub(crate) mod parts {
    pub(crate) use super::blocks::Blocks;
    pub(crate) use super::guest::Guest;
    pub(crate) use super::kvm::{Kvm, pins};
    pub(crate) use super::server::{Cookie, Record, Records};
    pub(crate) use super::share::Share;
}

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fathom_run::{Kind, Run};

use crate::analysis::{Delivery, Point};
use crate::clock::TimeBase;
use blocks::Blocks;
use guest::Guest;
use kvm::Kvm;
use lanes::Lane;
use merge::{Seen, Side};
use remote::Remote;
use server::Records;
use serving::Serving;
use survey::Survey;
use way::{Errors, Way};

/// Time in ns between a request's completion and its join; all its events arrive within it.
const SLACK: i64 = 10_000_000;
/// Time in ns after its start at which a request without a known end is given up.
const PATIENCE: i64 = 60_000_000_000;
/// The time to which the end of a recording sets the joiner's clock.
const END: i64 = i64::MAX / 2;
/// Number of events between two calls of [`Joiner::clear`].
const CLEAR_EVERY: u32 = 512;

/// Which points are watched in the round, for all its requests.
#[derive(Clone, Copy, Debug)]
struct Probes {
    benchmark: bool,
    bio: bool,
    kick: bool,
    exit: bool,
    doorbell: bool,
    /// The eventfd's signal has its own event.
    signal: bool,
    fathom: bool,
    interrupt: bool,
    /// The other host's server, to which this host's server forwards requests.
    remote: bool,
}

/// Numbers that a join counts, besides the requests that it passes to its sink.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) requests: u64,
    pub(crate) unmatched: u64,
    pub(crate) inconsistent: u64,
    /// Requests to the disk that the benchmark did not make.
    pub(crate) background: u64,
    /// Kicks that exited to user space.
    pub(crate) userspace: u64,
    /// Records of the remote server that match no request of this host's server.
    pub(crate) others: u64,
    /// Requests that were sent to another server, which was not watched.
    pub(crate) gone: u64,
    /// Requests that were in flight when the recording ended, and the age of the oldest in ns.
    pub(crate) in_flight: u64,
    pub(crate) oldest_in_flight: Option<i64>,
    /// Events read.
    pub(crate) events: u64,
}

/// Joins one round.
pub(crate) struct Joiner<'a> {
    time: &'a TimeBase,
    error: i64,
    errors: Errors,
    slack: i64,
    probes: Probes,
    guest: Guest,
    kvm: Kvm,
    records: Records,
    remote: Remote,
    serving: Serving,
    blocks: Blocks,
    host_only: Option<host_only::HostOnly>,
    /// Kicks and doorbells that are not linked yet, by vCPU.
    lanes: Vec<Lane>,
    expiry: BinaryHeap<Reverse<(i64, u64)>>,
    now: i64,
    /// The start of the first unit and the latest start or end of a unit.
    first: Option<i64>,
    last: i64,
    /// The time of the host's last event.
    last_host: i64,
    /// Starts of requests that were in flight when the recording ended.
    in_flight: Vec<i64>,
    since_clearing: u32,
    counts: Counts,
    sink: Box<dyn FnMut(Way) + 'a>,
}

impl<'a> Joiner<'a> {
    /// Creates a joiner for a round of `run`; it passes joined requests to `sink`.
    pub(crate) fn new(
        run: &Run,
        survey: &Survey,
        time: &'a TimeBase,
        sink: impl FnMut(Way) + 'a,
    ) -> Joiner<'a> {
        let guest_seen = time.error.is_some() && survey.any(Side::Guest);
        let blocks = Blocks::new(run, survey);
        let probes = Probes {
            benchmark: survey.guest(Kind::BenchOperation),
            bio: survey.guest(Kind::BlockBioQueue),
            kick: survey.guest(Kind::VpNotify),
            exit: survey.host(Kind::KvmExit),
            doorbell: survey.doorbells() || survey.host(Kind::EventfdSignal),
            signal: survey.host(Kind::EventfdSignal)
                && run
                    .disk()
                    .is_some_and(|disk| !disk.kick_eventfds.is_empty()),
            fathom: survey.host(Kind::FathomRequest),
            interrupt: match run.disk().is_some_and(|disk| !kvm::pins(disk).is_empty()) {
                true => survey.host(Kind::KvmSetIrq),
                false => survey.host(Kind::KvmMsiSetIrq),
            },
            remote: time.remote_error.is_some() && survey.any(Side::Remote),
        };
        let host_only =
            (!guest_seen).then(|| host_only::HostOnly::new(probes.fathom, blocks.is_watched()));
        let error = time.error.unwrap_or(0);
        let errors = Errors {
            guest: error,
            remote: time.remote_error.unwrap_or(0),
        };
        Joiner {
            time,
            error,
            errors,
            slack: SLACK + 4 * error.max(errors.remote),
            probes,
            guest: Guest::new(run.disk(), survey),
            kvm: Kvm::new(run, survey),
            records: Records::default(),
            remote: Remote::default(),
            serving: Serving::default(),
            blocks,
            host_only,
            lanes: Vec::new(),
            expiry: BinaryHeap::new(),
            now: i64::MIN,
            first: None,
            last: i64::MIN,
            last_host: i64::MIN,
            in_flight: Vec::new(),
            since_clearing: 0,
            counts: Counts::default(),
            sink: Box::new(sink),
        }
    }

    /// Processes the next event.
    pub(crate) fn event(&mut self, seen: &Seen) {
        self.counts.events += 1;
        self.now = self.now.max(seen.at);
        match seen.side {
            Side::Guest => self.guest_event(seen),
            Side::Host => self.host_event(seen),
            Side::Remote => {
                let ns = |ticks| self.time.ns(seen.clock, ticks);
                self.remote.event(seen.at, &seen.event, ns);
            }
        }
        self.settle(self.now - self.slack);
        self.since_clearing += 1;
        if self.since_clearing >= CLEAR_EVERY {
            self.since_clearing = 0;
            self.clear();
        }
    }

    /// Follows or gives up all remaining requests, and returns the counts.
    pub(crate) fn finish(mut self) -> Counts {
        let end = std::mem::replace(&mut self.now, END);
        self.settle(END);
        self.drop_in_flight();
        self.expire_units(i64::MAX);
        self.close_kicks(i64::MAX);
        let since = self.window_start();
        self.records.prune(self.last, since);
        self.remote.prune(i64::MAX);
        self.close_lanes(i64::MAX);
        Counts {
            inconsistent: self.counts.inconsistent
                + self.guest.inconsistent
                + self.serving.garbled
                + self.records.strays
                + self.records.garbled
                + self.remote.garbled(),
            background: self.guest.background,
            userspace: self.kvm.userspace,
            others: self.remote.others,
            in_flight: self.in_flight.len() as u64,
            oldest_in_flight: self
                .in_flight
                .iter()
                .map(|&start| end.saturating_sub(start))
                .max(),
            ..self.counts
        }
    }

    /// Collects the requests that are in flight when the recording ends: they contradict nothing.
    /// Operations are collected when their units expire.
    fn drop_in_flight(&mut self) {
        for rq in self.guest.drop_in_flight() {
            if rq.units.is_empty() {
                self.in_flight.push(rq.issue);
            }
            // The server may have ended the request.
            let from = rq.issue.saturating_sub(self.error);
            self.records.take(rq.key, from, END);
        }
        if self.host_only.is_some() {
            self.in_flight.extend(self.blocks.in_flight());
        }
    }

    /// Returns the time from which events on the host need a cause in the guest. Events before the
    /// first operation do not belong to the benchmark. Without a benchmark, no event needs a cause.
    fn window_start(&self) -> i64 {
        match self.probes.benchmark {
            true => self.first.unwrap_or(i64::MAX),
            false => i64::MAX,
        }
    }

    fn guest_event(&mut self, seen: &Seen) {
        if self.host_only.is_some() {
            return;
        }
        let end = match seen.event.kind {
            Kind::BenchOperation => self.time.ns(seen.clock, seen.event.args[0]),
            _ => None,
        };
        let before = self.guest.kicks.newest().map(|(id, _)| id);
        self.guest.event(seen.at, &seen.event, end);
        let newest = self.guest.kicks.newest().map(|(id, kick)| (id, kick.cpu));
        if let Some((id, cpu)) = newest.filter(|&(id, _)| Some(id) != before) {
            let lane = self.lane(Some(u32::from(cpu)));
            lane.kicks.push_back((id, seen.at));
        }
        for id in std::mem::take(&mut self.guest.fresh) {
            let Some(unit) = self.guest.units.get(id) else {
                continue;
            };
            self.counts.requests += 1;
            let start = unit.start().min(seen.at);
            let due = match unit.end {
                Some(end) => end + 2 * self.slack,
                None => start + PATIENCE,
            };
            self.first = Some(self.first.map_or(start, |first| first.min(start)));
            self.last = self.last.max(unit.end.unwrap_or(start));
            self.expiry.push(Reverse((due, id)));
        }
    }

    fn host_event(&mut self, seen: &Seen) {
        let (at, event) = (seen.at, &seen.event);
        self.last_host = self.last_host.max(at);
        match event.kind {
            Kind::FathomRequest => {
                let ns = |ticks| self.time.ns(seen.clock, ticks);
                let record = self.records.parse(at, event, ns);
                match (record, &mut self.host_only) {
                    (Some(record), Some(host)) => host.record(record),
                    (Some(record), None) => self.records.push(record),
                    (None, _) => {}
                }
            }
            Kind::BlockRqIssue | Kind::BlockRqComplete => {
                let known = self.blocks.event(at, event);
                self.counts.inconsistent += u64::from(!known && at >= self.window_start());
                if let (Kind::BlockRqComplete, Some(host)) = (event.kind, &mut self.host_only) {
                    host.completed(at, &self.blocks);
                }
            }
            Kind::SysEnter | Kind::SysExit | Kind::Lost => self.serving.event(at, event),
            _ => self.kvm.event(at, event),
        }
        for id in std::mem::take(&mut self.kvm.fresh) {
            let Some(doorbell) = self.kvm.doorbells.get(id).copied() else {
                continue;
            };
            if let Some(host) = &mut self.host_only {
                host.rung(id, &doorbell);
                continue;
            }
            let lane = self.lane(doorbell.vcpu);
            lane.doorbells.push_back((id, doorbell.at()));
        }
    }

    /// Follows all requests that completed by `due`; their events have all been read.
    fn settle(&mut self, due: i64) {
        self.link(due);
        if self.host_only.is_some() {
            self.settle_host(due);
            return;
        }
        while let Some(&id) = self.guest.completed.front() {
            let complete = self.guest.rqs.get(id).and_then(|rq| rq.complete);
            if complete.is_some_and(|complete| complete > due) {
                break;
            }
            self.guest.completed.pop_front();
            self.settle_rq(id);
        }
        self.expire_units(due + self.slack);
    }

    fn settle_rq(&mut self, id: u64) {
        let Some(rq) = self.guest.rqs.remove(id) else {
            return;
        };
        let way = self.follow(&rq);
        if let Some(kick) = rq.kick.and_then(|id| self.guest.kicks.get_mut(id)) {
            kick.settled += 1;
            let brought = way
                .as_ref()
                .is_none_or(|way| way.delivery != Delivery::Polled);
            kick.polled += u32::from(!brought);
        }
        for &unit_id in &rq.units {
            let Some(unit) = self.guest.units.get_mut(unit_id) else {
                continue;
            };
            unit.open -= 1;
            match &way {
                Some(way) => {
                    // Completed requests arrive in order, so this one is the last so far.
                    let seen = unit.last.take();
                    let mut way = way.clone();
                    if let Some(seen) = seen {
                        way.ambiguous |= seen.ambiguous;
                        way.incomplete |= seen.incomplete;
                        way.violations += seen.violations;
                    }
                    unit.last = Some(Box::new(way));
                    unit.kick = rq.kick;
                }
                None => unit.broken = true,
            }
            if unit.todo == 0 && unit.open == 0 {
                self.close_unit(unit_id);
            }
        }
        self.flush_kick(rq.kick);
    }

    fn close_unit(&mut self, id: u64) {
        let Some(unit) = self.guest.forget(id) else {
            return;
        };
        let whole = unit.todo == 0 && unit.open == 0 && !unit.broken;
        let Some(mut way) = unit.last.as_deref().filter(|_| whole).cloned() else {
            self.counts.unmatched += 1;
            return;
        };
        let bio = unit.bio_of(way.key.offset.max(unit.key.offset));
        way.number = id;
        way.key = unit.key;
        way.ambiguous |= unit.ambiguous;
        way.incomplete |= self.probes.bio && bio.is_none();
        way.points.put(Point::Call, unit.call);
        way.points.put(Point::Bio, bio);
        way.points.put(Point::Return, unit.end);
        way.violations += way.misordered(self.errors);
        let announced = matches!(way.delivery, Delivery::Kicked | Delivery::Batched);
        let kick = unit.kick.filter(|_| announced);
        match kick.and_then(|id| self.guest.kicks.get_mut(id)) {
            Some(kick) if kick.settled < kick.members => kick.ways.push(way),
            Some(kick) => {
                way.batch = kick.members - kick.polled;
                (self.sink)(way);
            }
            None => (self.sink)(way),
        }
    }

    /// Passes the requests of a kick to the sink once all of them are followed.
    fn flush_kick(&mut self, id: Option<u64>) {
        let kick = id.and_then(|id| self.guest.kicks.get_mut(id));
        if let Some(kick) = kick.filter(|kick| kick.settled == kick.members) {
            let batch = kick.members - kick.polled;
            for way in std::mem::take(&mut kick.ways) {
                (self.sink)(Way { batch, ..way });
            }
        }
    }

    /// Gives up units whose deadline has passed.
    fn expire_units(&mut self, now: i64) {
        while let Some(&Reverse((due, id))) = self.expiry.peek()
            && due <= now
        {
            self.expiry.pop();
            if let Some(unit) = self.guest.units.get(id) {
                if unit.end.is_none() && self.now == END {
                    self.in_flight.push(unit.start());
                    self.counts.requests -= 1;
                    self.guest.forget(id);
                    continue;
                }
                if let Some(unit) = self.guest.units.get_mut(id) {
                    unit.broken = true;
                }
                self.close_unit(id);
            }
        }
    }

    /// Drops everything that no later request can refer to.
    fn clear(&mut self) {
        let oldest = self.guest.units.oldest().map(|(_, unit)| unit.start());
        let waiting = self.guest.completed.front();
        let waiting = waiting.and_then(|&id| Some(self.guest.rqs.get(id)?.issue));
        let host = self.host_only.as_ref().and_then(|host| host.oldest());
        let is_patient = |issue: &i64| *issue > self.now.saturating_sub(PATIENCE);
        let running = self.blocks.in_flight().filter(is_patient).min();
        let running = running.filter(|_| self.host_only.is_some());
        let horizon = [oldest, waiting, host, running]
            .into_iter()
            .flatten()
            .fold(self.now - self.slack, i64::min)
            - self.slack;
        self.close_lanes(horizon);
        self.close_kicks(horizon);
        self.kvm.prune(horizon);
        self.serving.prune(horizon);
        let since = self.window_start();
        self.records.prune(horizon, since);
        self.blocks.prune(horizon);
        self.remote.prune(horizon);
        let handlers = &mut self.guest.handlers;
        // Keep one handler before the horizon: it bounds the search before the next handler.
        while handlers.get(1).is_some_and(|handler| handler.at < horizon) {
            handlers.pop_front();
        }
        self.guest.expire(self.now - PATIENCE);
        if let Some(host) = &mut self.host_only {
            host.prune(horizon);
        }
    }

    fn close_kicks(&mut self, at: i64) {
        while let Some((id, kick)) = self.guest.kicks.oldest()
            && kick.at < at
        {
            let Some(kick) = self.guest.kicks.remove(id) else {
                return;
            };
            let batch = kick.members - kick.polled;
            for way in kick.ways {
                (self.sink)(Way { batch, ..way });
            }
        }
    }
}
