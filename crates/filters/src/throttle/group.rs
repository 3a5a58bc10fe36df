//! The disks that share limits.

use super::Settings;
use super::bucket::Bucket;
use super::limits::{COUNTED, Direction, Limits, What};
use crate::filter::Options;
use fathom_core::{Clock, Op, Request};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What members of one group have used up.
pub(super) struct Group {
    name: Option<String>,
    options: Arc<Options<Settings>>,
    /// In the order of [`COUNTED`]: at the sustained rate, and at a burst's.
    buckets: [(Bucket, Bucket); COUNTED.len()],
}

impl Group {
    pub(super) fn new(name: Option<String>) -> Arc<Group> {
        let unlimited = Settings {
            limits: Limits {
                each: [None; COUNTED.len()],
                iops_size: None,
            },
            group: name.clone(),
        };
        Arc::new(Group {
            name,
            options: Arc::new(Options::new(unlimited)),
            buckets: Default::default(),
        })
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(super) fn options(&self) -> Arc<Options<Settings>> {
        self.options.clone()
    }

    /// These are the limits from now on, and all bursts are still to come.
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

    /// The tick at which the request may go, from `now` on. It is counted.
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

/// The groups of one daemon, by name, for as long as they have members.
#[derive(Default)]
pub struct Groups(Mutex<BTreeMap<String, Weak<Group>>>);

impl Groups {
    pub(super) fn join(&self, name: &str) -> Arc<Group> {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get(name).and_then(Weak::upgrade) {
            return group;
        }
        let group = Group::new(Some(name.to_owned()));
        groups.insert(name.to_owned(), Arc::downgrade(&group));
        group
    }
}
