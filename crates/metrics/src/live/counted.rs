//! What a disk has counted until a moment: what is needed to subtract it from a later moment.

use crate::counts::DiskCounts;
use fathom_trace::{HistogramsState, Op, Stage};
use std::collections::BTreeMap;

/// Of one operation, of all workers together. Times are in ticks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpCounted {
    /// How long requests took, by the histogram's bucket.
    pub buckets: BTreeMap<usize, u64>,
    /// How long they were in each stage.
    pub stages: [u64; Stage::COUNT],
    pub total: u64,
    /// The longest.
    pub max: u64,
    /// Whether one of the interval has taken that long: before, all were shorter.
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

    /// What has come since.
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

/// All operations, in the order of [`Op::ALL`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counted {
    pub ops: [OpCounted; Op::COUNT],
    pub refused: u64,
    /// For how long; None: a server of before did not know.
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

    /// What has come since an earlier moment of the same disk; None: the disk has gone meanwhile and
    /// come back, so that all of it has.
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

    /// All requests together.
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
