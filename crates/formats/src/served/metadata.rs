//! Keeps track of an image's metadata, so that nothing else is written over it.

use super::layout::Problem;
use crate::HostOffset;
use crate::qcow2::{Region, Regions};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The exact regions of the metadata, behind the lock of the image's state.
pub(super) struct Metadata {
    regions: Regions,
    /// Clusters of the L2 tables found at activation, sorted.
    tables: Vec<u64>,
    new_tables: BTreeSet<u64>,
    filter: Arc<Filter>,
}

impl Metadata {
    /// Creates the list from all regions and the clusters of all active L2 tables.
    ///
    /// Fails if a table is used twice or overlaps other metadata.
    pub(super) fn new(regions: Regions, mut tables: Vec<u64>) -> Result<Metadata, Problem> {
        let filter = Filter::new();
        let bits = regions.cluster_bits();
        tables.sort_unstable();
        if let Some(twice) = tables.windows(2).find(|w| w[0] == w[1]) {
            let at = twice[0] << bits;
            return Err(format!("the L2 table at {at:#x} is used twice"));
        }
        regions
            .clusters_of_all()
            .flatten()
            .for_each(|c| filter.add(c));
        for cluster in &tables {
            filter.add(*cluster);
            if let Some(region) = regions.overlap(HostOffset::of_cluster(*cluster, bits), 1) {
                let at = cluster << bits;
                return Err(format!("the L2 table at {at:#x} overlaps {region}"));
            }
        }
        Ok(Metadata {
            regions,
            tables,
            new_tables: BTreeSet::new(),
            filter,
        })
    }

    /// Returns an empty list, for images that are not written to.
    pub(super) fn none() -> Metadata {
        Metadata {
            regions: Regions::default(),
            tables: Vec::new(),
            new_tables: BTreeSet::new(),
            filter: Filter::new(),
        }
    }

    /// Returns the filter that excludes metadata without a lock.
    pub(super) fn filter(&self) -> Arc<Filter> {
        self.filter.clone()
    }

    /// Returns the metadata that a write to the cluster would hit.
    pub(super) fn in_cluster(&self, cluster: u64) -> Option<Region> {
        let bits = self.regions.cluster_bits();
        if self.tables.binary_search(&cluster).is_ok() || self.new_tables.contains(&cluster) {
            return Some(Region::ActiveL2);
        }
        self.regions
            .overlap(HostOffset::of_cluster(cluster, bits), 1)
    }

    /// Adds the clusters of a new L2 table.
    pub(super) fn add_table(&mut self, clusters: std::ops::Range<u64>) {
        for cluster in clusters {
            self.filter.add(cluster);
            self.new_tables.insert(cluster);
        }
    }

    /// Removes the clusters of an L2 table.
    pub(super) fn remove_table(&mut self, clusters: std::ops::Range<u64>) {
        for cluster in clusters {
            if let Ok(at) = self.tables.binary_search(&cluster) {
                self.tables.remove(at);
            }
            self.new_tables.remove(&cluster);
        }
    }

    /// Adds other metadata, in clusters that were free.
    pub(super) fn add(&mut self, region: Region, clusters: std::ops::Range<u64>) {
        let bits = self.regions.cluster_bits();
        clusters.clone().for_each(|c| self.filter.add(c));
        let len = (clusters.end - clusters.start) << bits;
        let added = self
            .regions
            .add(region, HostOffset::of_cluster(clusters.start, bits), len);
        debug_assert!(added.is_ok());
    }

    /// Removes the region of this offset and length.
    pub(super) fn remove_bytes(&mut self, offset: HostOffset, len: u64) {
        self.regions.remove(offset, len);
    }
}

const FILTER_WORDS: usize = 4096;

/// Tells without a lock that a cluster holds no metadata, or that it may hold some.
pub(super) struct Filter(Box<[AtomicU64]>);

impl Filter {
    fn new() -> Arc<Filter> {
        let words = std::iter::repeat_with(AtomicU64::default).take(FILTER_WORDS);
        Arc::new(Filter(words.collect()))
    }

    /// Returns the word and the bit of a cluster. The upper bits of the product depend on all bits.
    #[inline]
    fn place(cluster: u64) -> (usize, u64) {
        let hash = cluster.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - 18);
        ((hash >> 6) as usize, 1 << (hash & 63))
    }

    fn add(&self, cluster: u64) {
        let (word, bit) = Filter::place(cluster);
        self.0[word].fetch_or(bit, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn may_be_metadata(&self, cluster: u64) -> bool {
        let (word, bit) = Filter::place(cluster);
        self.0[word].load(Ordering::Relaxed) & bit != 0
    }
}
