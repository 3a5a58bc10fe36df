//! The server's own records of its requests, until the guest's requests match them.

use std::collections::{HashMap, VecDeque};

use fathom_run::{Event, flags};
use smallvec::SmallVec;

use super::way::Key;

/// How a request is known to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cookie {
    Came(u64),
    Went(u64),
    /// The request was sent as several commands.
    Several,
}

impl Cookie {
    fn of(event: &Event) -> Option<Cookie> {
        let (_, flags, _) = event.fathom_rest();
        let cookie = event.args[9];
        [
            (flags::CAME, Cookie::Came(cookie)),
            (flags::WENT, Cookie::Went(cookie)),
            (flags::SEVERAL, Cookie::Several),
        ]
        .into_iter()
        .find_map(|(flag, cookie)| (flags & flag != 0).then_some(cookie))
    }
}

/// A request as `fathom serve` saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) key: Key,
    pub(crate) queue: u16,
    pub(crate) polled: bool,
    pub(crate) wake: i64,
    pub(crate) pop: i64,
    pub(crate) map: i64,
    pub(crate) device: i64,
    pub(crate) result: i64,
    pub(crate) used: i64,
    pub(crate) end: i64,
    /// When a kick woke the queue's server the time before.
    pub(crate) previous_wake: i64,
    pub(crate) cookie: Option<Cookie>,
    serial: u64,
}

/// Records that are not matched yet.
#[derive(Debug, Default)]
pub(crate) struct Records {
    by_key: HashMap<Key, SmallVec<[Record; 1]>>,
    /// (end, key, serial), in order of the wakes.
    order: VecDeque<(i64, Key, u64)>,
    /// (queue, last wake by a kick, the one before).
    wakes: Vec<(u16, i64, i64)>,
    serial: u64,
    /// Number of records that no guest request matched.
    pub(crate) strays: u64,
    /// Number of records whose stages are not in order.
    pub(crate) garbled: u64,
}

impl Records {
    /// Parses a record; `ns` converts the event's times.
    pub(crate) fn parse(
        &mut self,
        at: i64,
        event: &Event,
        ns: impl Fn(u64) -> Option<i64>,
    ) -> Option<Record> {
        let time = |i: usize| ns(event.args[i]);
        let (queue, flags, _errno) = event.fathom_rest();
        let record = Record {
            key: Key::new(flags, event.args[6], event.args[7]),
            queue,
            polled: flags & flags::POLLED != 0,
            wake: at,
            pop: time(0)?,
            map: time(1)?,
            device: time(2)?,
            result: time(3)?,
            used: time(4)?,
            end: time(5)?,
            previous_wake: i64::MIN,
            cookie: Cookie::of(event),
            serial: self.serial,
        };
        self.serial += 1;
        let stages = [
            record.wake,
            record.pop,
            record.map,
            record.device,
            record.result,
            record.used,
            record.end,
        ];
        if !stages.is_sorted() {
            self.garbled += 1;
            return None;
        }
        Some(Record {
            previous_wake: self.note_wake(queue, &record),
            ..record
        })
    }

    fn note_wake(&mut self, queue: u16, record: &Record) -> i64 {
        let known = self.wakes.iter_mut().find(|(q, _, _)| *q == queue);
        let Some((_, last, before)) = known else {
            self.wakes.push((queue, record.wake, i64::MIN));
            return i64::MIN;
        };
        if record.polled {
            return *last;
        }
        if *last != record.wake {
            (*last, *before) = (record.wake, *last);
        }
        *before
    }

    pub(crate) fn push(&mut self, record: Record) {
        self.order
            .push_back((record.end, record.key, record.serial));
        self.by_key.entry(record.key).or_default().push(record);
    }

    /// Removes the record of a request that the server had within `from..=to`. Returns the record
    /// and whether several matched; of several, the one taken first.
    pub(crate) fn take(&mut self, key: Key, from: i64, to: i64) -> Option<(Record, bool)> {
        let records = self.by_key.get_mut(&key)?;
        let meets = |record: &Record| record.used >= from && record.pop <= to;
        let inside = |record: &Record| record.pop >= from && record.used <= to;
        let count = records.iter().filter(|record| meets(record)).count();
        // A record inside the interval precedes one that only overlaps it.
        let rank = |record: &&Record| (!inside(record), record.pop, record.serial);
        let best = records
            .iter()
            .filter(|record| meets(record))
            .min_by_key(rank)?;
        let serial = best.serial;
        let at = records.iter().position(|record| record.serial == serial)?;
        let record = records.remove(at);
        if records.is_empty() {
            self.by_key.remove(&key);
        }
        Some((record, count > 1))
    }

    /// Gives up records that ended before `at`; those that began at or after `since` are strays.
    pub(crate) fn prune(&mut self, at: i64, since: i64) {
        while let Some(&(end, key, serial)) = self.order.front()
            && end < at
        {
            self.order.pop_front();
            let Some(records) = self.by_key.get_mut(&key) else {
                continue;
            };
            let waiting = records.iter().position(|record| record.serial == serial);
            if let Some(i) = waiting {
                let record = records.remove(i);
                self.strays += u64::from(record.wake >= since);
                if records.is_empty() {
                    self.by_key.remove(&key);
                }
            }
        }
    }
}
