//! The counters of a disk at a moment, which can be subtracted from those of a later moment.

use crate::counts::DiskCounts;
use fathom_trace::{HistogramsState, Op, Stage};
use std::collections::BTreeMap;

/// The counters of one operation for all workers together, with times in ticks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpCounted {
    /// Number of requests by bucket of the duration's histogram.
    pub buckets: BTreeMap<usize, u64>,
    /// Total time of the requests in each stage.
    pub stages: [u64; Stage::COUNT],
    pub total: u64,
    /// The longest duration.
    pub max: u64,
    /// Whether a request of the interval took that long, and none before the interval.
    pub max_is_new: bool,
    pub bytes: u64,
    pub errors: u64,
}

impl OpCounted {
    pub fn requests(&self) -> u64 {
        self.buckets.values().sum()
    }

    pub fn add(&mut self, other: &OpCounted) {
        for (bucket, n) in &other.buckets {
            *self.buckets.entry(*bucket).or_default() += n;
        }
        for (mine, theirs) in self.stages.iter_mut().zip(other.stages) {
            *mine = mine.wrapping_add(theirs);
        }
        self.total = self.total.wrapping_add(other.total);
        if other.max >= self.max {
            (self.max, self.max_is_new) = (other.max, other.max_is_new);
        }
        self.bytes += other.bytes;
        self.errors += other.errors;
    }

    /// Returns the increase since `before`.
    fn since(&self, before: &OpCounted) -> OpCounted {
        let then = |bucket: &usize| before.buckets.get(bucket).copied().unwrap_or(0);
        let buckets = self.buckets.iter();
        let buckets = buckets.map(|(bucket, n)| (*bucket, n.saturating_sub(then(bucket))));
        let mut stages = self.stages;
        for (stage, before) in stages.iter_mut().zip(before.stages) {
            *stage = stage.wrapping_sub(before);
        }
        OpCounted {
            buckets: buckets.filter(|(_, n)| *n > 0).collect(),
            stages,
            total: self.total.wrapping_sub(before.total),
            max: self.max,
            max_is_new: self.max > before.max,
            bytes: self.bytes.saturating_sub(before.bytes),
            errors: self.errors.saturating_sub(before.errors),
        }
    }
}

/// The counters of all operations, in the order of [`Op::ALL`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counted {
    pub ops: [OpCounted; Op::COUNT],
    pub refused: u64,
    /// Time that the counters cover, in seconds. `None`: an older server did not record it.
    pub seconds: Option<f64>,
}

impl Counted {
    pub fn of(counts: &DiskCounts) -> Counted {
        Counted {
            ops: Op::ALL.map(|op| of_op(op, &counts.histograms)),
            refused: counts.refused,
            seconds: counts.seconds,
        }
    }

    /// Returns the increase since an earlier moment of the same disk.
    ///
    /// Returns `None` if the disk was removed and added again in between: then all counts are new.
    pub fn since(&self, before: &Counted) -> Option<Counted> {
        let mut pairs = self.ops.iter().zip(&before.ops);
        let fell = pairs.any(|(now, then)| now.requests() < then.requests());
        if fell || self.seconds < before.seconds {
            return None;
        }
        let mut ops = self.ops.clone();
        for (op, before) in ops.iter_mut().zip(&before.ops) {
            *op = op.since(before);
        }
        Some(Counted {
            ops,
            refused: self.refused.saturating_sub(before.refused),
            seconds: self
                .seconds
                .zip(before.seconds)
                .map(|(now, then)| now - then),
        })
    }

    /// Returns the sum of all operations.
    pub fn all(&self) -> OpCounted {
        let mut all = OpCounted::default();
        self.ops.iter().for_each(|op| all.add(op));
        all
    }
}

fn of_op(op: Op, workers: &[HistogramsState]) -> OpCounted {
    let mut all = OpCounted::default();
    for worker in workers {
        all.bytes += worker.bytes(op);
        all.errors += worker.errnos(op).iter().map(|(_, n)| n).sum::<u64>();
        let Some((total, stages)) = worker.of(op).split_last() else {
            continue;
        };
        for (mine, stage) in all.stages.iter_mut().zip(stages) {
            *mine = mine.wrapping_add(stage.sum());
        }
        all.total = all.total.wrapping_add(total.sum());
        all.max = all.max.max(total.max());
        for (bucket, n) in total.buckets() {
            *all.buckets.entry(bucket).or_default() += n;
        }
    }
    all.max_is_new = true;
    all
}
