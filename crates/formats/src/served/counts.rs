//! Counters of an image in use, outside the path of single requests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters since the image was opened, which only grow.
#[derive(Debug, Default)]
pub struct ImageCounts {
    table_reads: AtomicU64,
    allocated: AtomicU64,
    freed: AtomicU64,
}

impl ImageCounts {
    /// Returns the number of table slices that were read, also of backing images: 4 KiB at most
    /// each.
    pub fn table_reads(&self) -> u64 {
        self.table_reads.load(Relaxed)
    }

    /// Returns the number of clusters that were allocated, for data and for tables.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Relaxed)
    }

    /// Returns the number of clusters that became free again.
    ///
    /// The contents of the clusters were discarded, zeroed or written elsewhere, or the clusters
    /// were never used.
    pub fn freed(&self) -> u64 {
        self.freed.load(Relaxed)
    }

    pub(super) fn read_table(&self) {
        self.table_reads.fetch_add(1, Relaxed);
    }

    pub(super) fn allocate(&self, clusters: u64) {
        self.allocated.fetch_add(clusters, Relaxed);
    }

    pub(super) fn free(&self, clusters: u64) {
        self.freed.fetch_add(clusters, Relaxed);
    }
}
