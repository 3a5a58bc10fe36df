//! A round's requests as each side alone sees them, to relate the sides' clocks.

use std::collections::VecDeque;
use std::path::Path;

use fathom_run::{Kind, Round, Run};

use super::TimeBase;
use crate::join::merge::{Merged, Side};
use crate::join::parts::{Blocks, Guest, Kvm, Record, Records};
use crate::join::survey::Survey;
use crate::join::way::Key;

/// Maximum number of requests used; more do not reduce the error. Bounds the memory.
const MOST: usize = 200_000;
/// Time in ns after a request's end within which all its events arrive.
const SLACK: i64 = 10_000_000;
/// Number of operations that are kept for their requests.
const MOST_OPERATIONS: u64 = 1 << 14;
/// Number of events between two removals of old events.
const CLEAR_EVERY: usize = 512;

/// A request by the guest's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestTrip {
    pub(crate) key: Key,
    pub(crate) issue: i64,
    pub(crate) complete: i64,
    /// The request's kick and handler, if it was alone in flight: only then are they its own.
    pub(crate) kick: Option<i64>,
    pub(crate) handler: Option<i64>,
}

/// A request by the host's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostTrip {
    /// None where only kicks and interrupts are seen.
    pub(crate) key: Option<Key>,
    /// The guest issued the request before `from`, and completes it after `to`.
    pub(crate) from: i64,
    pub(crate) to: i64,
    /// The guest kicked before this time.
    pub(crate) exit: Option<i64>,
    /// The guest's handler runs after this time.
    pub(crate) back: Option<i64>,
}

/// Returns the guest's requests, in order of their issue.
pub(crate) fn of_guest(
    dir: &Path,
    run: &Run,
    round: &Round,
    survey: &Survey,
    time: &TimeBase,
) -> Vec<GuestTrip> {
    let alone = time.clone().guest_alone();
    let mut merged = Merged::open(dir, round, &alone, |side| side == Side::Guest);
    let mut guest = Guest::new(run.disk(), survey);
    let mut trips: Vec<GuestTrip> = Vec::new();
    while let Some(seen) = merged.next()
        && trips.len() < MOST
    {
        let end = Some(seen.at); // the true end of an operation is not needed here
        guest.event(seen.at, &seen.event, end);
        for id in std::mem::take(&mut guest.fresh) {
            // No caller removes operations here, so drop the old ones without a request.
            if let Some(old) = id.checked_sub(MOST_OPERATIONS) {
                guest.forget(old);
            }
        }
        while let Some(id) = guest.completed.pop_front() {
            trips.extend(guest.trip(id));
        }
        if seen.event.kind == Kind::BlockRqComplete {
            guest.clear(seen.at - SLACK);
        }
    }
    trips.sort_by_key(|trip| trip.issue);
    only_alone(&mut trips);
    trips
}

/// Drops the kicks and handlers of requests that overlap others.
fn only_alone(trips: &mut [GuestTrip]) {
    let mut busy_until = i64::MIN;
    for i in 0..trips.len() {
        let next = trips.get(i + 1).map_or(i64::MAX, |next| next.issue);
        let trip = &mut trips[i];
        if trip.issue <= busy_until || next <= trip.complete {
            (trip.kick, trip.handler) = (None, None);
        }
        busy_until = busy_until.max(trip.complete);
    }
}

/// Returns the host's requests, in order of their start.
pub(crate) fn of_host(
    dir: &Path,
    run: &Run,
    round: &Round,
    survey: &Survey,
    time: &TimeBase,
) -> Vec<HostTrip> {
    let mut merged = Merged::open(dir, round, time, |side| side == Side::Host);
    let mut host = Host {
        kvm: Kvm::new(run, survey),
        blocks: Blocks::new(run, survey),
        records: Records::default(),
        pending: VecDeque::new(),
        kicked: None,
        polls: false,
        trips: Vec::new(),
    };
    let by_record = survey.host(Kind::FathomRequest);
    // Keys of the device's bytes match no request of the guest.
    let by_block = !by_record && host.blocks.is_watched() && host.blocks.is_placed();
    let mut events = 0;
    while let Some(seen) = merged.next()
        && host.trips.len() < MOST
    {
        let (at, event) = (seen.at, &seen.event);
        match event.kind {
            Kind::FathomRequest => {
                let ns = |ticks| time.ns(seen.clock, ticks);
                if let Some(record) = host.records.parse(at, event, ns) {
                    host.polls |= record.polled;
                    host.pending.push_back(Pending::record(&record));
                }
            }
            Kind::BlockRqIssue => {
                host.blocks.event(at, event);
            }
            Kind::BlockRqComplete => {
                host.blocks.event(at, event);
                if let Some((key, issue, _)) = host.blocks.just_completed().filter(|_| by_block) {
                    host.pending
                        .push_back(Pending::new(Some(key), issue, issue, at));
                }
            }
            Kind::KvmMsiSetIrq => {
                host.kvm.event(at, event);
                if !by_record && !by_block {
                    let kicked = host.kvm.newest_kick();
                    let fresh = kicked.filter(|kick| host.kicked.replace(*kick) != Some(*kick));
                    let trip = fresh.map(|kick| Pending::new(None, kick, kick, at));
                    host.pending.extend(trip);
                }
            }
            _ => host.kvm.event(at, event),
        }
        host.kvm.fresh.clear();
        host.settle(at - SLACK);
        events += 1;
        if events % CLEAR_EVERY == 0 {
            host.clear(at);
        }
    }
    host.settle(i64::MAX);
    host.trips.sort_by_key(|trip| trip.from);
    host.trips
}

/// A host request that waits until the events around it are known.
#[derive(Clone, Copy, Debug)]
struct Pending {
    key: Option<Key>,
    /// The kick came before this time; None if no kick was needed.
    kicked: Option<i64>,
    from: i64,
    to: i64,
}

impl Pending {
    fn new(key: Option<Key>, kicked: i64, from: i64, to: i64) -> Pending {
        Pending {
            key,
            kicked: Some(kicked),
            from,
            to,
        }
    }

    fn record(record: &Record) -> Pending {
        Pending {
            key: Some(record.key),
            kicked: (!record.polled).then_some(record.wake),
            from: record.pop,
            to: record.used,
        }
    }
}

struct Host {
    kvm: Kvm,
    blocks: Blocks,
    records: Records,
    pending: VecDeque<Pending>,
    /// The last kick that an interrupt followed.
    kicked: Option<i64>,
    /// The server polls, so a request's kick is not certain.
    polls: bool,
    trips: Vec<HostTrip>,
}

impl Host {
    fn settle(&mut self, due: i64) {
        while let Some(&pending) = self.pending.front()
            && pending.to <= due
        {
            self.pending.pop_front();
            let (exit, sent) = self.kvm.around(pending.kicked, pending.to);
            let only = self.kvm.only_vcpu();
            let entry = only.zip(sent);
            let entry = entry.and_then(|(vcpu, at)| self.kvm.entry_after(vcpu, at).ok()?);
            self.trips.push(HostTrip {
                key: pending.key,
                from: pending.from,
                to: pending.to,
                // Without KVM's events, the server's wake follows the kick.
                exit: exit.or(pending.kicked).filter(|_| !self.polls),
                back: entry.or(sent).or(Some(pending.to)),
            });
        }
    }

    fn clear(&mut self, now: i64) {
        let oldest = self.pending.front().map_or(now, |pending| pending.from);
        let horizon = oldest.min(now) - 2 * SLACK;
        self.kvm.prune(horizon);
        self.blocks.prune(horizon);
    }
}
