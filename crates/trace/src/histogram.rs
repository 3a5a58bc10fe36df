//! A log-linear histogram with one writer and any number of readers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Each power of two is divided into this many buckets, so a value is known
/// to 1/32 (3.1%) of itself.
const SUB_BITS: u32 = 5;
const SUB: usize = 1 << SUB_BITS;
/// Values from 2^MAX_BITS (about 25 minutes of a 3 GHz TSC) fall into the
/// last bucket; the sum and the maximum stay exact.
const MAX_BITS: u32 = 42;
/// Number of buckets.
pub const BUCKETS: usize = (MAX_BITS - SUB_BITS + 1) as usize * SUB;

/// Counts of values, in whatever unit the writer uses.
///
/// Only one thread may write; readers see each counter whole, but the set of
/// counters only as consistent as relaxed loads make it (a request may be in
/// the count and not yet in the sum).
pub struct Histogram {
    buckets: Box<[AtomicU64]>,
    sum: AtomicU64,
    max: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
            max: AtomicU64::new(0),
        }
    }
}

#[inline]
fn bucket_of(value: u64) -> usize {
    if value < SUB as u64 {
        return value as usize;
    }
    let shift = 63 - value.leading_zeros() - SUB_BITS;
    let index = (shift as usize) * SUB + (value >> shift) as usize;
    index.min(BUCKETS - 1)
}

/// The smallest value of a bucket and the number of values in it.
fn bucket_range(index: usize) -> (u64, u64) {
    if index < 2 * SUB {
        return (index as u64, 1);
    }
    let shift = index / SUB - 1;
    (((index % SUB + SUB) as u64) << shift, 1 << shift)
}

/// A plain add: there is one writer, so no locked instruction is needed.
#[inline]
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

impl Histogram {
    /// Count `value` `n` times. Only the one writer may call this.
    #[inline]
    pub fn record_n(&self, value: u64, n: u64) {
        add(&self.buckets[bucket_of(value)], n);
        add(&self.sum, value.wrapping_mul(n));
        if value > self.max.load(Relaxed) {
            self.max.store(value, Relaxed);
        }
    }

    /// A copy to compute with.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            buckets: self.buckets.iter().map(|b| b.load(Relaxed)).collect(),
            sum: self.sum.load(Relaxed),
            max: self.max.load(Relaxed),
        }
    }
}

/// A histogram at one instant; several merge into one.
#[derive(Clone, Debug)]
pub struct Snapshot {
    buckets: Vec<u64>,
    sum: u64,
    max: u64,
}

impl Default for Snapshot {
    fn default() -> Snapshot {
        Snapshot {
            buckets: vec![0; BUCKETS],
            sum: 0,
            max: 0,
        }
    }
}

impl Snapshot {
    pub fn merge(&mut self, other: &Snapshot) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.sum = self.sum.wrapping_add(other.sum);
        self.max = self.max.max(other.max);
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The buckets that hold anything, in order: from, to (exclusive), count.
    pub fn occupied(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let counts = self.buckets.iter().copied().enumerate();
        counts.filter(|(_, n)| *n > 0).map(|(index, n)| {
            let (from, width) = bucket_range(index);
            (from, from + width, n)
        })
    }

    pub fn sum(&self) -> u64 {
        self.sum
    }

    pub fn max(&self) -> u64 {
        self.max
    }

    pub fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum as f64 / count as f64)
    }

    /// The value below which a share `q` (0 to 1) of the values lie,
    /// interpolated within its bucket. None where fewer than `MIN_BEYOND`
    /// values lie beyond it, because such a figure is chance; the median of
    /// anything at all is given.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        const MIN_BEYOND: f64 = 10.0;
        let count = self.count();
        if count == 0 || (q > 0.5 && (1.0 - q) * (count as f64) < MIN_BEYOND - 1e-6) {
            return None;
        }
        let rank = q * count as f64;
        let mut below = 0.0;
        for (index, &n) in self.buckets.iter().enumerate().filter(|(_, n)| **n > 0) {
            if below + n as f64 >= rank {
                let (low, width) = bucket_range(index);
                let inside = (rank - below) / n as f64;
                let value = low as f64 + inside * (width - 1) as f64;
                return Some(value.min(self.max as f64));
            }
            below += n as f64;
        }
        Some(self.max as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket() {
        for bits in 0..MAX_BITS {
            for value in [1u64 << bits, (1 << bits) + 1, (2u64 << bits) - 1] {
                let (low, width) = bucket_range(bucket_of(value));
                assert!(low <= value && value < low + width, "{value}");
                assert!(width == 1 || width * SUB as u64 <= low, "{value}");
            }
        }
    }

    #[test]
    fn buckets_follow_one_another_without_gaps() {
        let mut next = 0;
        for index in 0..BUCKETS {
            let (low, width) = bucket_range(index);
            assert_eq!(low, next);
            assert_eq!(bucket_of(low), index);
            next = low + width;
        }
    }

    #[test]
    fn huge_values_are_counted_and_kept_exact_in_sum_and_max() {
        let histogram = Histogram::default();
        histogram.record_n(1 << 50, 2);
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count(), 2);
        assert_eq!(snapshot.max(), 1 << 50);
        assert_eq!(snapshot.mean(), Some((1u64 << 50) as f64));
    }

    #[test]
    fn quantiles_agree_with_a_sorted_list() {
        let histogram = Histogram::default();
        let mut values: Vec<u64> = (0..100_000u64).map(|i| (i * i) % 1_000_003).collect();
        values.iter().for_each(|v| histogram.record_n(*v, 1));
        values.sort_unstable();
        let snapshot = histogram.snapshot();
        for q in [0.5, 0.9, 0.99, 0.999] {
            let exact = values[(q * values.len() as f64) as usize] as f64;
            let got = snapshot.quantile(q).unwrap();
            assert!((got / exact - 1.0).abs() < 0.035, "{q}: {got} {exact}");
        }
    }

    #[test]
    fn no_percentile_without_ten_samples_beyond_it() {
        let histogram = Histogram::default();
        histogram.record_n(7, 999);
        assert_eq!(histogram.snapshot().quantile(0.99), None);
        histogram.record_n(7, 1);
        assert_eq!(histogram.snapshot().quantile(0.99), Some(7.0));
        assert_eq!(Histogram::default().snapshot().quantile(0.5), None);
    }

    #[test]
    fn merging_is_counting_together() {
        let (a, b) = (Histogram::default(), Histogram::default());
        a.record_n(10, 3);
        b.record_n(1000, 5);
        let mut merged = a.snapshot();
        merged.merge(&b.snapshot());
        assert_eq!(
            (merged.count(), merged.max(), merged.sum()),
            (8, 1000, 5030)
        );
        let together = Histogram::default();
        together.record_n(10, 3);
        together.record_n(1000, 5);
        assert!(merged.occupied().eq(together.snapshot().occupied()));
    }
}
