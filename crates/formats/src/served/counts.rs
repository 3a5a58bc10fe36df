//! What is counted of an image in use, beside each request's way.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// From when the image was opened. All of these only grow.
#[derive(Debug, Default)]
pub struct ImageCounts {
    table_reads: AtomicU64,
    allocated: AtomicU64,
    freed: AtomicU64,
}

impl ImageCounts {
    /// How often a part of its tables was not in memory, and was read: 4 KiB each, of backing files, too.
    pub fn table_reads(&self) -> u64 {
        self.table_reads.load(Relaxed)
    }

    /// Clusters that were taken into use, for data and for tables.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Relaxed)
    }

    /// Clusters that can be taken again: what was in them was discarded, zeroed or written elsewhere, or
    /// they were not needed.
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
