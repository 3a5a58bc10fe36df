//! Selects the requests that are affected by faults.

use super::{number, size};
use crate::random::mix;
use crate::values::{Values, probability, range};
use fathom_core::{Op, Request};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Criteria from the settings.
pub(super) struct Choice {
    /// Affected operations, indexed by `Op as usize`.
    operations: [bool; Op::COUNT],
    range: Option<Range<u64>>,
    probability: f64,
    seed: u64,
    /// Maximum number of faults; 0 for no limit.
    count: u64,
    /// Bytes to be moved before the first fault.
    after: u64,
}

/// Counts since the last change of the settings; shared by all workers.
#[derive(Default)]
pub(super) struct History {
    requests: AtomicU64,
    chosen: AtomicU64,
    bytes: AtomicU64,
}

impl History {
    fn counters(&self) -> [&AtomicU64; 3] {
        [&self.requests, &self.chosen, &self.bytes]
    }

    pub(super) fn forget(&self) {
        self.go_on_from([0; 3]);
    }

    /// Returns the counts for the handover state.
    pub(super) fn counts(&self) -> [u64; 3] {
        self.counters().map(|counter| counter.load(Relaxed))
    }

    pub(super) fn go_on_from(&self, counts: [u64; 3]) {
        let counters = self.counters().into_iter().zip(counts);
        counters.for_each(|(counter, count)| counter.store(count, Relaxed));
    }
}

const OPERATIONS: [(&str, Op); 5] = [
    ("read", Op::Read),
    ("write", Op::Write),
    ("flush", Op::Flush),
    ("trim", Op::Discard),
    ("zero", Op::WriteZeroes),
];

fn operations(text: &str) -> Result<[bool; Op::COUNT], String> {
    let mut chosen = [false; Op::COUNT];
    for name in text.split('+') {
        let known = OPERATIONS.iter().find(|(known, _)| *known == name);
        let (_, op) = known.ok_or_else(|| {
            format!("'{name}' is not read, write, flush, trim or zero (several are joined by +)")
        })?;
        chosen[*op as usize] = true;
    }
    Ok(chosen)
}

impl Choice {
    pub(super) fn parse(values: &Values<'_>) -> Result<Choice, String> {
        Ok(Choice {
            operations: values
                .optional("op", operations)?
                .unwrap_or([true; Op::COUNT]),
            range: values.optional("range", range)?,
            probability: values.get("probability", probability)?,
            seed: values.get("seed", number)?,
            count: values.get("count", number)?,
            after: values.get("after", size)?,
        })
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns whether the request is affected, and counts it.
    pub(super) fn takes(&self, history: &History, request: &Request) -> bool {
        if !self.operations[request.op as usize] || !self.touches(request) {
            return false;
        }
        self.is_after(history, request.len)
            && self.falls_on(history.requests.fetch_add(1, Relaxed))
            && self.has_left(history)
    }

    /// Returns whether a read is affected, and counts it unless it is counted already. The read's
    /// sectors are chosen one by one ([`Choice::takes_sector`]).
    pub(super) fn takes_sectors_of(
        &self,
        history: &History,
        read: &Request,
        is_counted: bool,
    ) -> bool {
        let len = if is_counted { 0 } else { read.len };
        self.operations[Op::Read as usize] && self.touches(read) && self.is_after(history, len)
    }

    /// Counts `len` bytes, and returns whether enough were moved for faults to begin.
    fn is_after(&self, history: &History, len: u64) -> bool {
        let moved = history.bytes.fetch_add(len, Relaxed);
        self.after == 0 || moved.saturating_add(len) > self.after
    }

    /// Counts a fault, and returns whether it is one of the first `count`.
    fn has_left(&self, history: &History) -> bool {
        self.count == 0 || history.chosen.fetch_add(1, Relaxed) < self.count
    }

    /// Returns whether the request touches the range. A flush touches all bytes.
    fn touches(&self, request: &Request) -> bool {
        let Some(range) = &self.range else {
            return true;
        };
        let end = request.offset.saturating_add(request.len);
        request.op == Op::Flush || request.offset < range.end && end > range.start
    }

    /// Returns whether this sector of an affected read is affected, and counts it.
    pub(super) fn takes_sector(&self, history: &History, sector: u64) -> bool {
        let start = sector * 512;
        let in_range = |range: &Range<u64>| start < range.end && start + 512 > range.start;
        self.range.as_ref().is_none_or(in_range) && self.falls_on(sector) && self.has_left(history)
    }

    /// Draws with the configured probability. The result is always the same for the same number and
    /// seed.
    fn falls_on(&self, number: u64) -> bool {
        let drawn = mix(mix(self.seed) ^ number) >> 11;
        (drawn as f64) < self.probability * (1u64 << 53) as f64
    }
}
