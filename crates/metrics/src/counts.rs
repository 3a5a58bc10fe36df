//! Counters of a disk.

use crate::worker_info::WorkerInfo;
use fathom_trace::{HistogramsState, SlowRequest};
use serde::{Deserialize, Serialize};

/// Counters of a disk, by worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DiskCounts {
    /// Histograms of each worker, followed by those that predecessors have passed on.
    pub histograms: Vec<HistogramsState>,
    /// Counters of each worker, by its index.
    pub workers: Vec<WorkerInfo>,
    /// Number of requests that were rejected at once, as in [`Summary`](fathom_trace::Summary).
    pub refused: u64,
    /// Time that the counters cover, in seconds. Absent if it comes from an older server.
    #[serde(default)]
    pub seconds: Option<f64>,
    /// Some of the slowest requests, the slowest first.
    #[serde(default)]
    pub slow: Vec<SlowRequest>,
}

impl DiskCounts {
    /// Replaces the histograms of the workers by their sum.
    pub fn merge_histograms(&mut self) {
        self.histograms = vec![HistogramsState::merged(&self.histograms)];
    }
}
