//! Counters of the references to each cluster of a file.

use crate::{Error, Result};
use std::collections::HashMap;

/// A counter of two bytes per cluster. The few clusters with more references are counted in `many`.
pub(crate) struct Counters {
    counts: Vec<u16>,
    /// Counts of the clusters whose counter is `MANY`.
    many: HashMap<usize, u64>,
}

const MANY: u16 = u16::MAX;

impl Counters {
    /// Creates counters for `clusters` clusters, all 0. Pages that stay 0 take no memory.
    pub(crate) fn new(clusters: u64, max_memory: u64) -> Result<Counters> {
        let fits = clusters.checked_mul(2).is_some_and(|b| b <= max_memory);
        let Some(clusters) = usize::try_from(clusters).ok().filter(|_| fits) else {
            return Err(Error::unsupported(format!(
                "the file's {clusters} clusters need more than the {max_memory} bytes of memory \
                 that are allowed for counting them"
            )));
        };
        Ok(Counters {
            counts: vec![0; clusters],
            many: HashMap::new(),
        })
    }

    pub(crate) fn len(&self) -> u64 {
        self.counts.len() as u64
    }

    /// Returns the number of references of a cluster; 0 for clusters beyond the last.
    pub(crate) fn get(&self, cluster: u64) -> u64 {
        let at = usize::try_from(cluster).unwrap_or(usize::MAX);
        match self.counts.get(at) {
            None => 0,
            Some(&MANY) => self.many.get(&at).copied().unwrap_or(MANY.into()),
            Some(&count) => count.into(),
        }
    }

    fn set(&mut self, at: usize, count: u64) {
        match u16::try_from(count) {
            Ok(count) if count < MANY => self.counts[at] = count,
            _ => {
                self.counts[at] = MANY;
                self.many.insert(at, count);
            }
        }
    }

    /// Adds `by` references to a cluster. Clusters beyond the last are ignored.
    pub(crate) fn add(&mut self, cluster: u64, by: u64) {
        if cluster < self.len() {
            let count = self.get(cluster).saturating_add(by);
            self.set(cluster as usize, count);
        }
    }

    /// Removes a reference from a cluster.
    pub(crate) fn remove(&mut self, cluster: u64) {
        if cluster < self.len() {
            let count = self.get(cluster).saturating_sub(1);
            self.set(cluster as usize, count);
        }
    }

    /// Extends the counters to `clusters` clusters.
    pub(crate) fn grow(&mut self, clusters: u64) {
        let clusters = clusters as usize;
        if clusters > self.counts.len() {
            self.counts.resize(clusters, 0);
        }
    }

    /// Number of the last cluster with references, plus one.
    pub(crate) fn end(&self) -> u64 {
        let used = self.counts.iter().rposition(|c| *c != 0);
        used.map_or(0, |at| at as u64 + 1)
    }

    /// Whether any of these clusters has references.
    pub(crate) fn any(&self, clusters: std::ops::Range<u64>) -> bool {
        let end = clusters.end.min(self.len()) as usize;
        let start = (clusters.start as usize).min(end);
        self.counts[start..end].iter().any(|c| *c != 0)
    }
}

/// A bit per cluster.
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    /// Creates a set of `len` bits, all 0. The caller has bounded `len`.
    pub(crate) fn new(len: u64) -> Bits {
        Bits(vec![0; len.div_ceil(64) as usize])
    }

    /// Returns a bit; false beyond the last.
    pub(crate) fn get(&self, at: u64) -> bool {
        let word = usize::try_from(at / 64).unwrap_or(usize::MAX);
        self.0.get(word).is_some_and(|w| w >> (at % 64) & 1 == 1)
    }

    /// Sets a bit. Bits beyond the last are ignored.
    pub(crate) fn set(&mut self, at: u64) {
        let word = usize::try_from(at / 64).unwrap_or(usize::MAX);
        if let Some(word) = self.0.get_mut(word) {
            *word |= 1 << (at % 64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_no_limit() {
        let mut counters = Counters::new(10, 100).unwrap();
        counters.add(3, 65534);
        assert_eq!(counters.get(3), 65534);
        counters.add(3, 1);
        assert_eq!(counters.get(3), 65535);
        counters.add(3, 1 << 40);
        assert_eq!(counters.get(3), 65535 + (1 << 40));
        counters.remove(3);
        assert_eq!(counters.get(3), 65534 + (1 << 40));
        counters.add(10, 1);
        assert_eq!((counters.get(10), counters.end()), (0, 4));
        assert!(counters.any(0..100) && !counters.any(4..100));
        assert!(Counters::new(51, 100).is_err());
        assert!(Counters::new(u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn bits_are_independent() {
        let mut bits = Bits::new(70);
        bits.set(64);
        bits.set(1000);
        assert!(bits.get(64) && !bits.get(63) && !bits.get(0) && !bits.get(1000));
    }
}
