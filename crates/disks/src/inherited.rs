//! What was counted before this process was there.

use fathom_metrics::DiskCounts;
use fathom_metrics::WorkerInfo;
use fathom_trace::{SlowRequest, StageHistograms};

/// What a predecessor has counted.
pub struct Inherited {
    histograms: Vec<StageHistograms>,
    workers: Vec<WorkerInfo>,
    refused: u64,
    seconds: Option<f64>,
    slow: Vec<SlowRequest>,
}

impl Default for Inherited {
    /// Nothing, in no time.
    fn default() -> Inherited {
        Inherited {
            histograms: Vec::new(),
            workers: Vec::new(),
            refused: 0,
            seconds: Some(0.0),
            slow: Vec::new(),
        }
    }
}

impl Inherited {
    pub fn of(counts: &DiskCounts) -> Inherited {
        // One for all: how many there are does not grow with each upgrade.
        let all = StageHistograms::default();
        counts.histograms.iter().for_each(|state| all.absorb(state));
        Inherited {
            histograms: vec![all],
            workers: counts.workers.clone(),
            refused: counts.refused,
            seconds: counts.seconds,
            slow: counts.slow.clone(),
        }
    }

    pub fn histograms(&self) -> impl Iterator<Item = &StageHistograms> {
        self.histograms.iter()
    }

    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// The slowest requests of then.
    pub fn slow(&self) -> &[SlowRequest] {
        &self.slow
    }

    /// For how long it was counted; absent where that is not known.
    pub fn seconds(&self) -> Option<f64> {
        self.seconds
    }

    /// What a worker has done by now, with what the predecessor's of its number has.
    pub fn add_to(&self, index: usize, own: WorkerInfo) -> WorkerInfo {
        match self.workers.get(index) {
            Some(before) => own.and(before),
            None => own,
        }
    }
}
