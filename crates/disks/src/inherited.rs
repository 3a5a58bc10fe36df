//! Counters of a disk's predecessors, in this process or in others.

use fathom_metrics::DiskCounts;
use fathom_metrics::WorkerInfo;
use fathom_trace::{SlowRequest, StageHistograms};

/// The counters of a predecessor, which include those of its own predecessors.
pub struct Inherited {
    histograms: Vec<StageHistograms>,
    workers: Vec<WorkerInfo>,
    refused: u64,
    seconds: Option<f64>,
    slow: Vec<SlowRequest>,
}

impl Default for Inherited {
    /// Returns the counters of a disk without a predecessor.
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
        // All histograms are merged into one, so that their number does not grow with each upgrade.
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

    /// Returns the slowest requests that predecessors have counted.
    pub fn slow(&self) -> &[SlowRequest] {
        &self.slow
    }

    /// Time that the counters cover, in seconds. None: the time is unknown.
    pub fn seconds(&self) -> Option<f64> {
        self.seconds
    }

    /// Adds the counters of the predecessor's worker with this index to those of a worker.
    pub fn add_to(&self, index: usize, own: WorkerInfo) -> WorkerInfo {
        match self.workers.get(index) {
            Some(before) => own.and(before),
            None => own,
        }
    }
}
