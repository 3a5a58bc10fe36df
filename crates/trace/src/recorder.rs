//! Turns finished requests into histograms, in batches.

use crate::histogram::{COARSE, Counts, Histogram};
use crate::stage::{Op, Stage, Stamps};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Per operation: a histogram of each stage, then one of the total.
pub struct StageHistograms {
    ops: [[Histogram; Stage::COUNT + 1]; Op::COUNT],
    /// Of these requests, how many were answered with an error.
    errors: [AtomicU64; Op::COUNT],
}

impl Default for StageHistograms {
    fn default() -> StageHistograms {
        StageHistograms {
            ops: std::array::from_fn(|_| std::array::from_fn(|_| Histogram::default())),
            errors: Default::default(),
        }
    }
}

impl StageHistograms {
    /// The stages of `op` in the order of [`Stage::ALL`], then the total.
    pub fn counts(&self, op: Op) -> Vec<Counts<COARSE>> {
        let stages = &self.ops[op as usize];
        stages.iter().map(Histogram::counts).collect()
    }

    /// How many requests were answered with an error.
    pub fn errors(&self, op: Op) -> u64 {
        self.errors[op as usize].load(Ordering::Relaxed)
    }
}

/// The one writer of a worker's histograms.
///
/// Requests of one batch often share every stamp. They are counted as a run
/// and reach the histograms together, which is what makes seven histograms
/// affordable for each request.
pub struct Recorder {
    histograms: Arc<StageHistograms>,
    op: Op,
    spent: [u64; Stage::COUNT],
    run: u64,
}

impl Recorder {
    pub fn new(histograms: Arc<StageHistograms>) -> Recorder {
        Recorder {
            histograms,
            op: Op::Read,
            spent: [0; Stage::COUNT],
            run: 0,
        }
    }

    /// Count a finished request. It is visible after [`Recorder::flush`].
    #[inline]
    pub fn record(&mut self, op: Op, stamps: &Stamps) {
        if cfg!(fathom_unstamped) {
            return;
        }
        if self.op == op && self.spent == *stamps.spent() {
            self.run += 1;
            return;
        }
        self.flush();
        self.op = op;
        self.spent = *stamps.spent();
        self.run = 1;
    }

    /// Count one that was answered with an error; it is recorded, too.
    #[cold]
    pub fn failed(&mut self, op: Op) {
        let errors = &self.histograms.errors[op as usize];
        errors.store(errors.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Make everything recorded so far visible; called once per batch.
    #[inline]
    pub fn flush(&mut self) {
        if self.run == 0 {
            return;
        }
        let histograms = &self.histograms.ops[self.op as usize];
        let mut total = 0;
        for (histogram, spent) in histograms.iter().zip(self.spent) {
            histogram.record_n(spent, self.run);
            total += spent;
        }
        histograms[Stage::COUNT].record_n(total, self.run);
        self.run = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_single_requests_count_alike() {
        let histograms = Arc::new(StageHistograms::default());
        let mut recorder = Recorder::new(histograms.clone());
        for (op, ticks) in [
            (Op::Read, 5),
            (Op::Read, 5),
            (Op::Write, 5),
            (Op::Read, 9),
            (Op::Read, 5),
        ] {
            let mut stamps = Stamps::start(0);
            stamps.enter(Stage::Device, 1);
            stamps.end(1 + ticks);
            recorder.record(op, &stamps);
        }
        recorder.flush();
        let reads = histograms.counts(Op::Read);
        assert_eq!(reads[Stage::Device as usize].count(), 4);
        assert_eq!(reads[Stage::Device as usize].sum(), 24);
        assert_eq!(reads[Stage::Wake as usize].sum(), 4);
        assert_eq!(reads[Stage::COUNT].sum(), 28);
        assert_eq!(histograms.counts(Op::Write)[Stage::COUNT].count(), 1);
    }
}
