//! Matches the remote server's records to the requests sent to it, by NBD cookie.

use std::collections::{HashMap, VecDeque};

use fathom_run::{Event, Kind};

use super::Joiner;
use super::server::{Cookie, Record, Records};
use super::way::Way;
use crate::analysis::{HostClass, Point};

/// A request as the remote server saw it, in times of this host's clock. The remote server may
/// have split the request: the stages are those of the piece that ended last.
#[derive(Clone, Copy, Debug)]
struct Part {
    record: Record,
    /// The wake of the first piece.
    wake: i64,
}

/// The remote parts that are not matched yet.
#[derive(Debug, Default)]
pub(crate) struct Remote {
    records: Records,
    by_cookie: HashMap<u64, Part>,
    /// (end, cookie) of each record, in the order of the wakes.
    order: VecDeque<(i64, u64)>,
    /// The time of the last wake.
    last: i64,
    /// Number of records that match no request of this host's server.
    pub(crate) others: u64,
}

impl Remote {
    /// Processes an event; `ns` converts its times.
    pub(crate) fn event(&mut self, at: i64, event: &Event, ns: impl Fn(u64) -> Option<i64>) {
        let is_request = event.kind == Kind::FathomRequest;
        if is_request && let Some(record) = self.records.parse(at, event, ns) {
            self.push(record);
        }
    }

    /// Returns the number of records whose stages are not in order.
    pub(crate) fn garbled(&self) -> u64 {
        self.records.garbled
    }

    fn push(&mut self, record: Record) {
        self.last = self.last.max(record.wake);
        let Some(Cookie::Came(cookie)) = record.cookie else {
            self.others += 1;
            return;
        };
        self.order.push_back((record.end, cookie));
        let part = self.by_cookie.entry(cookie).or_insert(Part {
            record,
            wake: record.wake,
        });
        if record.end > part.record.end {
            part.record = record;
        }
    }

    /// Gives up parts that ended before `at`.
    pub(crate) fn prune(&mut self, at: i64) {
        while let Some(&(end, cookie)) = self.order.front()
            && end < at
        {
            self.order.pop_front();
            let is_old = |part: &Part| part.record.end < at;
            if self.by_cookie.get(&cookie).is_some_and(is_old) {
                self.by_cookie.remove(&cookie);
                self.others += 1;
            }
        }
    }
}

impl Joiner<'_> {
    /// Follows a request of this host's server to the remote server. Returns false if the remote
    /// part may lie outside the recording there.
    pub(super) fn cross(&mut self, way: &mut Way, record: &Record) -> bool {
        let cookie = match record.cookie {
            None | Some(Cookie::Came(_)) => return true,
            _ if !self.probes.remote => {
                self.counts.gone += 1;
                return true;
            }
            Some(Cookie::Several) => {
                way.host = HostClass::Split;
                return true;
            }
            Some(Cookie::Went(cookie)) => cookie,
        };
        way.host = HostClass::Remote;
        let Some(Part { record, wake }) = self.remote.by_cookie.remove(&cookie) else {
            way.incomplete = true;
            return record.result < self.remote.last;
        };
        way.points.set(Point::RemoteWake, wake);
        way.points.set(Point::RemotePop, record.pop);
        way.points.set(Point::RemoteMap, record.map);
        way.points.set(Point::RemoteDevice, record.device);
        way.points.set(Point::RemoteResult, record.result);
        way.points.set(Point::RemoteSent, record.end);
        true
    }
}
