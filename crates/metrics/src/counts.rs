//! What is counted of a disk.

use crate::info::WorkerInfo;
use fathom_trace::{HistogramsState, SlowRequest};
use serde::{Deserialize, Serialize};

/// What is counted of a disk, by worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DiskCounts {
    pub histograms: Vec<HistogramsState>,
    pub workers: Vec<WorkerInfo>,
    pub refused: u64,
    /// For how long; absent where a server of before did not know.
    #[serde(default)]
    pub seconds: Option<f64>,
    /// Some of the slowest requests, the slowest first.
    #[serde(default)]
    pub slow: Vec<SlowRequest>,
}

impl DiskCounts {
    /// Replaces the workers' histograms by one with what all have counted.
    pub fn merge_histograms(&mut self) {
        self.histograms = vec![HistogramsState::merged(&self.histograms)];
    }
}
