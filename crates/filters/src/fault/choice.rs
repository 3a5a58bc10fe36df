//! Which requests it befalls.

use super::{number, size};
use crate::random::mix;
use crate::values::{Values, probability, range};
use fathom_core::{Op, Request};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the settings say of it.
pub(super) struct Choice {
    /// By `Op as usize`.
    operations: [bool; Op::COUNT],
    range: Option<Range<u64>>,
    probability: f64,
    seed: u64,
    /// Times; 0: any number.
    count: u64,
    /// Bytes.
    after: u64,
}

/// What has happened since the settings were last changed; shared by all
/// workers.
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

    /// For a successor's.
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

    /// Whether it befalls this request, which is counted.
    pub(super) fn takes(&self, history: &History, request: &Request) -> bool {
        if !self.operations[request.op as usize] || !self.touches(request) {
            return false;
        }
        let moved = history.bytes.fetch_add(request.len, Relaxed);
        if self.after > 0 && moved.saturating_add(request.len) <= self.after {
            return false;
        }
        let number = history.requests.fetch_add(1, Relaxed);
        if !self.falls_on(number) {
            return false;
        }
        self.count == 0 || history.chosen.fetch_add(1, Relaxed) < self.count
    }

    /// A flush is of all bytes.
    fn touches(&self, request: &Request) -> bool {
        let Some(range) = &self.range else {
            return true;
        };
        let end = request.offset.saturating_add(request.len);
        request.op == Op::Flush || request.offset < range.end && end > range.start
    }

    /// Whether it befalls what is read from this sector.
    pub(super) fn takes_sector(&self, sector: u64) -> bool {
        let start = sector * 512;
        let in_range = |range: &Range<u64>| start < range.end && start + 512 > range.start;
        self.operations[Op::Read as usize]
            && self.range.as_ref().is_none_or(in_range)
            && self.falls_on(sector)
    }

    /// By chance, but always the same for the same number and seed.
    fn falls_on(&self, number: u64) -> bool {
        let drawn = mix(mix(self.seed) ^ number) >> 11;
        (drawn as f64) < self.probability * (1u64 << 53) as f64
    }
}
