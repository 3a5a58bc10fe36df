//! A log-linear histogram with one increment per value and a constant relative error.
//!
//! [`Counts`] is for computation. [`Histogram`] is filled by one thread while other threads read
//! it.

use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Resolution of a histogram that is always on: values are exact to 1/32 (3.1%).
pub const COARSE: u32 = 5;
/// Resolution of a histogram of a measurement: values are exact to 1/128 (0.8%).
pub const FINE: u32 = 7;
/// Values from 2^MAX_BITS on fall into the last bucket; the sum and the maximum stay exact.
///
/// This value is more than an hour of a 3 GHz TSC.
const MAX_BITS: u32 = 44;

/// Returns the number of buckets: each power of two is divided into 2^BITS of them.
pub(crate) const fn buckets(bits: u32) -> usize {
    ((MAX_BITS - bits + 1) as usize) << bits
}

#[inline(always)]
pub(crate) fn bucket_of<const BITS: u32>(value: u64) -> usize {
    let value = value.min((1 << MAX_BITS) - 1);
    let shift = (63 - BITS).saturating_sub(value.leading_zeros());
    ((shift as usize) << BITS) + (value >> shift) as usize
}

/// Returns the smallest value of a bucket and the number of values in the bucket.
pub(crate) fn bucket_range<const BITS: u32>(index: usize) -> (u64, u64) {
    let sub = 1 << BITS;
    if index < 2 * sub {
        return (index as u64, 1);
    }
    let shift = index / sub - 1;
    (((index % sub + sub) as u64) << shift, 1 << shift)
}

/// Counts of values, in the writer's unit.
///
/// Only one thread may write. Readers see each counter whole, but the counters together are only as
/// consistent as relaxed loads allow. A request may already be in the count and not yet in the sum.
///
/// All bytes zero is an empty histogram.
pub struct Histogram {
    buckets: [AtomicU64; buckets(COARSE)],
    sum: AtomicU64,
    max: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram {
            buckets: [const { AtomicU64::new(0) }; buckets(COARSE)],
            sum: AtomicU64::new(0),
            max: AtomicU64::new(0),
        }
    }
}

/// Adds without a locked instruction, because there is only one writer.
#[inline]
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

impl Histogram {
    /// Counts `value` `n` times. Only the one writer may call this.
    #[inline]
    pub fn record_n(&self, value: u64, n: u64) {
        add(&self.buckets[bucket_of::<COARSE>(value)], n);
        add(&self.sum, value.wrapping_mul(n));
        if value > self.max.load(Relaxed) {
            self.max.store(value, Relaxed);
        }
    }

    /// Adds all counts of another histogram. Only the one writer may call this.
    pub(crate) fn absorb(&self, counts: &Occupied) {
        for (bucket, n) in &counts.buckets {
            if let Some(bucket) = self.buckets.get(*bucket) {
                add(bucket, *n);
            }
        }
        add(&self.sum, counts.sum);
        self.max
            .store(self.max.load(Relaxed).max(counts.max), Relaxed);
    }

    /// Returns the buckets that are not empty. No bucket above the maximum's is filled.
    pub(crate) fn occupied(&self) -> Occupied {
        let max = self.max.load(Relaxed);
        let buckets = self.buckets[..=bucket_of::<COARSE>(max)].iter();
        let counts = buckets.map(|bucket| bucket.load(Relaxed)).enumerate();
        Occupied {
            buckets: counts.filter(|(_, n)| *n > 0).collect(),
            sum: self.sum.load(Relaxed),
            max,
        }
    }

    /// Returns whether no value other than zero was counted.
    pub(crate) fn is_empty(&self) -> bool {
        self.max.load(Relaxed) == 0
    }

    /// Returns a copy for computation.
    pub fn counts(&self) -> Counts<COARSE> {
        Counts {
            buckets: self.buckets.iter().map(|b| b.load(Relaxed)).collect(),
            sum: self.sum.load(Relaxed),
            max: self.max.load(Relaxed),
        }
    }
}

/// The filled buckets of a histogram of the same resolution, for another process of the same
/// machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Occupied {
    /// Indices of buckets, with their counts.
    #[serde(with = "packed")]
    buckets: Vec<(usize, u64)>,
    sum: u64,
    max: u64,
}

impl Occupied {
    /// Returns the indices of buckets in order, with their counts. Every index is below
    /// [`BUCKETS`].
    pub fn buckets(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let known = self.buckets.iter().copied();
        known.filter(|(bucket, _)| *bucket < BUCKETS)
    }

    /// Returns the sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns the largest value.
    pub fn max(&self) -> u64 {
        self.max
    }
}

/// Serializes buckets as one text, `3:17 4:1`.
///
/// A thousand disks have a million buckets, and a JSON parser would allocate several objects for
/// each.
mod packed {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use std::borrow::Cow;
    use std::fmt::Write;

    pub fn serialize<S: Serializer>(buckets: &[(usize, u64)], to: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(8 * buckets.len());
        for (bucket, n) in buckets {
            write!(text, "{bucket}:{n} ").expect("a String takes it");
        }
        to.serialize_str(text.trim_end())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(usize, u64)>, D::Error> {
        let text = Cow::<str>::deserialize(from)?;
        let pairs = text.split_ascii_whitespace().map(|pair| {
            let (bucket, n) = pair.split_once(':')?;
            Some((bucket.parse().ok()?, n.parse().ok()?))
        });
        let pairs: Option<_> = pairs.collect();
        pairs.ok_or_else(|| D::Error::custom("no buckets of a histogram"))
    }
}

/// Number of buckets of a [`Histogram`].
pub const BUCKETS: usize = buckets(COARSE);

/// Returns the middle of a bucket of a [`Histogram`].
pub fn middle_of(bucket: usize) -> f64 {
    let (from, width) = bucket_range::<COARSE>(bucket);
    from as f64 + width as f64 / 2.0
}

/// Returns the lower and the upper bound of a bucket of a [`Histogram`].
pub fn range_of(bucket: usize) -> (f64, f64) {
    let (from, width) = bucket_range::<COARSE>(bucket);
    (from as f64, (from + width) as f64)
}

/// A histogram that one thread owns; several can be merged.
#[derive(Clone, Debug)]
pub struct Counts<const BITS: u32> {
    buckets: Box<[u64]>,
    sum: u64,
    max: u64,
}

impl<const BITS: u32> Default for Counts<BITS> {
    fn default() -> Self {
        Counts {
            buckets: vec![0; buckets(BITS)].into(),
            sum: 0,
            max: 0,
        }
    }
}

impl<const BITS: u32> Counts<BITS> {
    /// Adds one value.
    #[inline(always)]
    pub fn record(&mut self, value: u64) {
        self.buckets[bucket_of::<BITS>(value)] += 1;
        self.sum = self.sum.wrapping_add(value);
        self.max = self.max.max(value);
    }

    /// Adds all values of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.sum = self.sum.wrapping_add(other.sum);
        self.max = self.max.max(other.max);
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the buckets that are not empty, in order: from, to (exclusive), count.
    pub fn occupied(&self) -> impl Iterator<Item = (u64, u64, u64)> + Clone + use<'_, BITS> {
        let counts = self.buckets.iter().copied().enumerate();
        counts.filter(|(_, n)| *n > 0).map(|(index, n)| {
            let (from, width) = bucket_range::<BITS>(index);
            (from, from + width, n)
        })
    }

    /// Returns the sum of all values, modulo 2^64.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns the largest value, or 0 if the histogram is empty.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns the mean of all values, or `None` if the histogram is empty.
    pub fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum as f64 / count as f64)
    }

    /// Returns a quantile like [`quantile`], interpolated within a bucket.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        quantile(self.ranges(), self.max as f64, q)
    }

    fn ranges(&self) -> impl Iterator<Item = (f64, f64, u64)> + Clone + use<'_, BITS> {
        let ranges = self.occupied();
        ranges.map(|(from, to, n)| (from as f64, (to - 1) as f64, n))
    }
}

/// Returns whether at least ten of `count` values lie beyond quantile `q` (0 to 1).
///
/// With fewer, the quantile is chance: a p99.9 of 500 values is their maximum.
pub fn is_known(q: f64, count: u64) -> bool {
    const MIN_BEYOND: f64 = 10.0;
    (1.0 - q) * count as f64 >= MIN_BEYOND - 1e-6
}

/// Returns the value below which a share `q` (0 to 1) of the values lie.
///
/// `ranges` are the buckets in order (from, to, count), and `max` is the largest value. Returns
/// `None` for `q` above 0.5 if the quantile is not known ([`is_known`]). The median of any values
/// is returned.
pub fn quantile(
    ranges: impl Iterator<Item = (f64, f64, u64)> + Clone,
    max: f64,
    q: f64,
) -> Option<f64> {
    match q > 0.5 && !is_known(q, count(ranges.clone())) {
        true => None,
        false => quantile_of_any(ranges, max, q),
    }
}

fn quantile_of_any(
    ranges: impl Iterator<Item = (f64, f64, u64)> + Clone,
    max: f64,
    q: f64,
) -> Option<f64> {
    let rank = q * count(ranges.clone()) as f64;
    let mut below = 0.0;
    for (from, to, n) in ranges {
        if below + n as f64 >= rank {
            let inside = (rank - below) / n as f64;
            return Some((from + inside * (to - from)).min(max));
        }
        below += n as f64;
    }
    // Reached by rounding only, if there are any values.
    (below > 0.0).then_some(max)
}

fn count(ranges: impl Iterator<Item = (f64, f64, u64)>) -> u64 {
    ranges.fold(0, |sum: u64, (_, _, n)| sum.saturating_add(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket() {
        fn check<const BITS: u32>() {
            for bits in 0..MAX_BITS {
                for value in [1u64 << bits, (1 << bits) + 1, (2u64 << bits) - 1] {
                    let value = value.min((1 << MAX_BITS) - 1);
                    let (low, width) = bucket_range::<BITS>(bucket_of::<BITS>(value));
                    assert!(low <= value && value < low + width, "{value}");
                    assert!(width == 1 || width << BITS <= low, "{value}");
                }
            }
            assert_eq!(bucket_of::<BITS>(u64::MAX), buckets(BITS) - 1);
        }
        check::<COARSE>();
        check::<FINE>();
    }

    #[test]
    fn buckets_follow_one_another_without_gaps() {
        fn check<const BITS: u32>() {
            let mut next = 0;
            for index in 0..buckets(BITS) {
                let (low, width) = bucket_range::<BITS>(index);
                assert_eq!(low, next);
                assert_eq!(bucket_of::<BITS>(low), index);
                next = low + width;
            }
        }
        check::<COARSE>();
        check::<FINE>();
    }

    #[test]
    fn huge_values_are_counted_and_kept_exact_in_sum_and_max() {
        let histogram = Histogram::default();
        histogram.record_n(1 << 50, 2);
        let counts = histogram.counts();
        assert_eq!(counts.count(), 2);
        assert_eq!(counts.max(), 1 << 50);
        assert_eq!(counts.mean(), Some((1u64 << 50) as f64));
    }

    #[test]
    fn quantiles_agree_with_a_sorted_list() {
        let histogram = Histogram::default();
        let mut values: Vec<u64> = (0..100_000u64).map(|i| (i * i) % 1_000_003).collect();
        let mut fine = Counts::<FINE>::default();
        values.iter().for_each(|v| histogram.record_n(*v, 1));
        values.iter().for_each(|v| fine.record(*v));
        values.sort_unstable();
        let counts = histogram.counts();
        for q in [0.5, 0.9, 0.99, 0.999] {
            let exact = values[(q * values.len() as f64) as usize] as f64;
            let got = counts.quantile(q).unwrap();
            assert!((got / exact - 1.0).abs() < 0.035, "{q}: {got} {exact}");
            let got = fine.quantile(q).unwrap();
            assert!((got / exact - 1.0).abs() < 0.009, "{q}: {got} {exact}");
        }
    }

    #[test]
    fn no_percentile_without_ten_samples_beyond_it() {
        let histogram = Histogram::default();
        histogram.record_n(7, 999);
        assert_eq!(histogram.counts().quantile(0.99), None);
        histogram.record_n(7, 1);
        assert_eq!(histogram.counts().quantile(0.99), Some(7.0));
        assert_eq!(Histogram::default().counts().quantile(0.5), None);
        assert!(is_known(0.5, 20) && !is_known(0.5, 19));
        assert!(is_known(0.999, 10_000) && !is_known(0.999, 9_999));
    }

    #[test]
    fn merging_is_counting_together() {
        let (a, b) = (Histogram::default(), Histogram::default());
        a.record_n(10, 3);
        b.record_n(1000, 5);
        let mut merged = a.counts();
        merged.merge(&b.counts());
        assert_eq!(
            (merged.count(), merged.max(), merged.sum()),
            (8, 1000, 5030)
        );
        let together = Histogram::default();
        together.record_n(10, 3);
        together.record_n(1000, 5);
        assert!(merged.occupied().eq(together.counts().occupied()));
    }
}
