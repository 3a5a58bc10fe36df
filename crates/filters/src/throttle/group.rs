//! Groups of disks that share limits.

use super::Settings;
use super::bucket::Bucket;
use super::limits::{COUNTED, Direction, Limits, What};
use crate::filter::Options;
use fathom_core::{Clock, Op, Request};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Limits and consumption of the members of one group.
pub(super) struct Group {
    name: Option<String>,
    options: Arc<Options<Settings>>,
    /// For each entry of [`COUNTED`]: the bucket of the sustained rate and the bucket of the burst
    /// rate.
    buckets: [(Bucket, Bucket); COUNTED.len()],
    /// No levels were inherited or handed over yet, so the buckets are as initialised.
    is_new: AtomicBool,
}

/// Levels of a group's buckets.
#[derive(Serialize, Deserialize)]
struct Levels {
    /// When each bucket will be empty, in nanoseconds of CLOCK_MONOTONIC, which all processes
    /// share.
    empty_at: [(u64, u64); COUNTED.len()],
}

impl Group {
    pub(super) fn new(name: Option<String>) -> Arc<Group> {
        let unlimited = Settings {
            limits: Limits::unlimited(),
            group: name.clone(),
        };
        Arc::new(Group {
            name,
            options: Arc::new(Options::new(unlimited)),
            buckets: Default::default(),
            is_new: true.into(),
        })
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(super) fn options(&self) -> Arc<Options<Settings>> {
        self.options.clone()
    }

    /// Sets the limits. If they differ from the current ones, the buckets start anew with full
    /// bursts.
    pub(super) fn go_by(&self, limits: &Limits) {
        if self.options.settings().limits != *limits {
            self.begin(limits);
        }
    }

    /// Starts the buckets anew for these limits, with full bursts.
    pub(super) fn begin(&self, limits: &Limits) {
        let now = Clock::get().now();
        for ((sustained, burst), limit) in self.buckets.iter().zip(&limits.each) {
            match limit {
                Some(limit) if !limit.may_burst => sustained.fill(limit.sustained, now),
                _ => sustained.empty(),
            }
            burst.empty();
        }
    }

    /// Returns the levels for a successor.
    pub(super) fn levels(&self) -> Value {
        let clock = Clock::get();
        let now = clock.pair();
        let ns = |bucket: &Bucket| match bucket.empty_at().checked_sub(now.ticks) {
            Some(left) => now.monotonic_ns + clock.ns(left),
            None => 0,
        };
        // The disk that inherits the levels may be a member of this group.
        self.is_new.store(false, Ordering::Relaxed);
        json!(Levels {
            empty_at: self
                .buckets
                .each_ref()
                .map(|(sustained, burst)| (ns(sustained), ns(burst))),
        })
    }

    /// Continues from levels that belong to the same limits.
    pub(super) fn restore(&self, levels: Value) -> Result<(), String> {
        let levels = serde_json::from_value::<Levels>(levels);
        let levels =
            levels.map_err(|error| format!("cannot read the predecessor's levels: {error}"))?;
        let clock = Clock::get();
        let now = clock.pair();
        let ticks = |ns: u64| match ns.checked_sub(now.monotonic_ns) {
            Some(left) => now
                .ticks
                .saturating_add(clock.ticks(Duration::from_nanos(left))),
            None => 0,
        };
        // Other members may have consumed more since then.
        let is_new = self.is_new.swap(false, Ordering::Relaxed);
        for ((sustained, burst), (first, second)) in self.buckets.iter().zip(levels.empty_at) {
            for (bucket, empty_at) in [(sustained, ticks(first)), (burst, ticks(second))] {
                match is_new {
                    true => bucket.set_empty_at(empty_at),
                    false => bucket.raise(empty_at),
                }
            }
        }
        Ok(())
    }

    /// Reserves capacity for the request. Returns the tick at which the request may start, not
    /// before `now`.
    pub(super) fn reserve(&self, limits: &Limits, request: &Request, now: u64) -> u64 {
        let direction = match request.op {
            Op::Read => Direction::Read,
            _ => Direction::Write,
        };
        let len = request.len as f64;
        let operations = match limits.iops_size {
            Some(size) => (len / size as f64).max(1.0),
            None => 1.0,
        };
        let mut start = now;
        for (n, (_, what, of)) in COUNTED.iter().enumerate() {
            let Some(limit) = &limits.each[n] else {
                continue;
            };
            if ![Direction::Both, direction].contains(of) {
                continue;
            }
            let units = match what {
                What::Operations => operations,
                What::Bytes => len,
            };
            let (sustained, burst) = &self.buckets[n];
            start = start.max(sustained.reserve(limit.sustained, units, now));
            if let Some(rate) = limit.burst {
                start = start.max(burst.reserve(rate, units, now));
            }
        }
        start
    }
}

/// The groups of one server, by name. A group exists while it has members.
#[derive(Default)]
pub struct Groups(Mutex<BTreeMap<String, Weak<Group>>>);

impl Groups {
    pub(super) fn join(&self, name: &str) -> Arc<Group> {
        let mut groups = self.0.lock();
        if let Some(group) = groups.get(name).and_then(Weak::upgrade) {
            return group;
        }
        let group = Group::new(Some(name.to_owned()));
        groups.insert(name.to_owned(), Arc::downgrade(&group));
        group
    }
}
