//! Statistics of many values in bounded memory. Count, mean, deviation, minimum and maximum are
//! exact; percentiles come from a log-linear histogram and are within 1%.

use crate::analysis::Distribution;

/// log2 of the number of buckets to a power of two; a value is known to 1/128 (0.8%).
const SUB_BITS: u32 = 7;
const SUB: usize = 1 << SUB_BITS;
/// Number of octaves of a u64: the first holds the values below `SUB`, each other a power of two.
const OCTAVES: usize = (64 - SUB_BITS + 1) as usize;
/// Number of buckets that make one bucket of a curve; 32 to a power of two suffice for a picture.
const CURVE: usize = 4;
/// Number of samples that must lie beyond a percentile; with fewer, its value is chance.
const MIN_BEYOND: u64 = 10;

/// Counts values (ns, of either sign) and returns their distribution.
///
/// Adding a value allocates only for the first value in a power of two (1 KiB each).
#[derive(Clone, Debug)]
pub struct Tally {
    count: u64,
    sum: i128,
    /// The sum of squares, which is exact while it fits: for any 2^64 values below 2^32, and for
    /// any 2^27 values below 2^50 ns (13 days). Beyond, it saturates.
    squares: u128,
    min: i64,
    max: i64,
    positive: Octaves,
    negative: Octaves,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally {
            count: 0,
            sum: 0,
            squares: 0,
            min: i64::MAX,
            max: i64::MIN,
            positive: Octaves::default(),
            negative: Octaves::default(),
        }
    }
}

impl Tally {
    /// Creates an empty tally.
    pub fn new() -> Tally {
        Tally::default()
    }

    /// Counts one value.
    #[inline]
    pub fn add(&mut self, value: i64) {
        self.add_n(value, 1);
    }

    /// Counts a value `n` times.
    #[inline]
    pub fn add_n(&mut self, value: i64, n: u64) {
        if n == 0 {
            return;
        }
        let size = value.unsigned_abs();
        self.count += n;
        self.sum += i128::from(value) * i128::from(n);
        let square = u128::from(size) * u128::from(size);
        self.squares = self
            .squares
            .saturating_add(square.saturating_mul(u128::from(n)));
        self.min = self.min.min(value);
        self.max = self.max.max(value);
        if value < 0 {
            self.negative.add(size, n);
        } else {
            self.positive.add(size, n);
        }
    }

    /// Adds all values that `other` has counted.
    pub fn merge(&mut self, other: &Tally) {
        self.count += other.count;
        self.sum += other.sum;
        self.squares = self.squares.saturating_add(other.squares);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.positive.merge(&other.positive);
        self.negative.merge(&other.negative);
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the exact sum, limited to the range of i64.
    pub fn sum(&self) -> i64 {
        i64::try_from(self.sum).unwrap_or(if self.sum < 0 { i64::MIN } else { i64::MAX })
    }

    /// Returns the exact mean; 0 without values.
    pub fn mean(&self) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        // Divide the quotient and the remainder separately: an f64 cannot hold a large sum exactly.
        let count = i128::from(self.count);
        (self.sum / count) as f64 + (self.sum % count) as f64 / count as f64
    }

    /// Returns the sample standard deviation (by n - 1); 0 with fewer than two values.
    pub fn deviation(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        let count = self.count as f64;
        // The sum of squares around the mean is (n * squares - sum^2) / n. The difference is taken
        // in integers, because its terms are nearly equal when the values are.
        let exact = (|| {
            let left = self.squares.checked_mul(u128::from(self.count))?;
            let sum = self.sum.unsigned_abs();
            left.checked_sub(sum.checked_mul(sum)?)
        })();
        let around = match exact {
            Some(exact) => exact as f64 / count,
            None => self.squares as f64 - self.sum as f64 * (self.sum as f64 / count),
        };
        (around.max(0.0) / (count - 1.0)).sqrt()
    }

    /// Returns the value that `per_mille` of the values do not exceed, within 1%. Returns None if
    /// fewer than ten values lie beyond it.
    pub fn percentile(&self, per_mille: u32) -> Option<i64> {
        let wanted = u128::from(self.count) * u128::from(per_mille);
        let rank = u64::try_from(wanted.div_ceil(1000)).ok()?.max(1);
        if self.count < rank.checked_add(MIN_BEYOND)? {
            return None;
        }
        Some(self.value_at(rank))
    }

    /// Returns the `rank`th smallest value, counted from 1, interpolated within its bucket.
    fn value_at(&self, rank: u64) -> i64 {
        let mut below = 0;
        for (low, high, n) in self.buckets() {
            if below + n >= rank {
                let inside = (rank - below) as f64 / n as f64;
                let value = low as f64 + inside * (high as f64 - low as f64);
                return (value.round() as i64)
                    .clamp(low, high)
                    .clamp(self.min, self.max);
            }
            below += n;
        }
        self.max
    }

    /// Returns the non-empty buckets, rising: (lowest value, highest value, values in it).
    fn buckets(&self) -> impl Iterator<Item = (i64, i64, u64)> {
        let negative = self.negative.rising().rev();
        let negative = negative.map(|(low, high, n)| (negate(high), negate(low), n));
        let positive = self.positive.rising();
        let clip = |size: u64| i64::try_from(size).unwrap_or(i64::MAX);
        negative.chain(positive.map(move |(low, high, n)| (clip(low), clip(high), n)))
    }

    /// Returns the distribution for a report.
    pub fn finish(&self) -> Distribution {
        if self.count == 0 {
            return Distribution::default();
        }
        Distribution {
            count: self.count,
            mean: self.mean(),
            deviation: self.deviation(),
            min: self.min,
            max: self.max,
            p50: self.percentile(500),
            p90: self.percentile(900),
            p99: self.percentile(990),
            p999: self.percentile(999),
            buckets: self.curve(),
        }
    }

    /// Returns the buckets for curves, [`CURVE`] of ours in each; the last ends at the maximum.
    fn curve(&self) -> Vec<(i64, u64)> {
        let mut curve: Vec<(i64, u64)> = Vec::new();
        for (_, high, n) in self.buckets() {
            let end = curve_end(high).min(self.max);
            match curve.last_mut() {
                Some((last, sum)) if *last == end => *sum += n,
                _ => curve.push((end, n)),
            }
        }
        curve
    }
}

impl FromIterator<i64> for Tally {
    fn from_iter<I: IntoIterator<Item = i64>>(values: I) -> Tally {
        let mut tally = Tally::new();
        values.into_iter().for_each(|value| tally.add(value));
        tally
    }
}

fn negate(size: u64) -> i64 {
    0i64.checked_sub_unsigned(size).unwrap_or(i64::MIN)
}

/// Returns the greatest value in the same curve bucket as `value`.
fn curve_end(value: i64) -> i64 {
    let size = value.unsigned_abs();
    if size < 2 * SUB as u64 {
        return value;
    }
    let first = index_of(size) / CURVE * CURVE;
    if value < 0 {
        negate(range_of(first).0)
    } else {
        i64::try_from(range_of(first + CURVE - 1).1).unwrap_or(i64::MAX)
    }
}

#[inline]
fn index_of(size: u64) -> usize {
    if size < SUB as u64 {
        return size as usize;
    }
    let shift = 63 - size.leading_zeros() - SUB_BITS;
    shift as usize * SUB + (size >> shift) as usize
}

/// Returns the least and the greatest value of a bucket.
fn range_of(index: usize) -> (u64, u64) {
    if index < 2 * SUB {
        return (index as u64, index as u64);
    }
    let shift = index / SUB - 1;
    let low = ((index % SUB + SUB) as u64) << shift;
    (low, low + ((1 << shift) - 1))
}

/// Buckets of magnitudes, with a page for each power of two that has any values.
#[derive(Clone, Debug, Default)]
struct Octaves(Vec<Option<Box<[u64; SUB]>>>);

impl Octaves {
    #[inline]
    fn add(&mut self, size: u64, n: u64) {
        let index = index_of(size);
        self.page(index / SUB)[index % SUB] += n;
    }

    #[inline]
    fn page(&mut self, octave: usize) -> &mut [u64; SUB] {
        if self.0.is_empty() {
            self.0.resize(OCTAVES, None);
        }
        self.0[octave].get_or_insert_with(|| Box::new([0; SUB]))
    }

    fn merge(&mut self, other: &Octaves) {
        for (octave, page) in other.0.iter().enumerate() {
            if let Some(page) = page {
                let mine = self.page(octave);
                mine.iter_mut().zip(&**page).for_each(|(a, b)| *a += b);
            }
        }
    }

    /// Returns the non-empty buckets, rising: (lowest value, highest value, values in it).
    fn rising(&self) -> impl DoubleEndedIterator<Item = (u64, u64, u64)> {
        self.0.iter().enumerate().flat_map(|(octave, page)| {
            let counts: &[u64] = page.as_deref().map_or(&[], |page| page);
            counts.iter().enumerate().filter_map(move |(sub, &n)| {
                let (low, high) = range_of(octave * SUB + sub);
                (n > 0).then_some((low, high, n))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes (mean, deviation) from the whole list, by definition.
    fn oracle(values: &[i64]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|&v| v as f64).sum::<f64>() / n;
        let around: f64 = values.iter().map(|&v| (v as f64 - mean).powi(2)).sum();
        (mean, (around / (n - 1.0)).sqrt())
    }

    fn near(a: f64, b: f64, share: f64) -> bool {
        (a - b).abs() <= share * b.abs().max(1e-9)
    }

    #[test]
    fn the_buckets_cover_everything_once() {
        let mut next = 0u64;
        for index in 0..OCTAVES * SUB {
            let (low, high) = range_of(index);
            assert_eq!((low, index_of(low), index_of(high)), (next, index, index));
            assert!((high - low) as f64 <= low as f64 / SUB as f64, "{low}");
            next = high.wrapping_add(1);
        }
        assert_eq!(next, 0, "the last bucket ends at u64::MAX");
    }

    #[test]
    fn percentiles_need_ten_samples_beyond_them() {
        let of = |n: i64| (1..=n).collect::<Tally>().finish();
        assert_eq!((of(19).p50, of(20).p50), (None, Some(10)));
        assert_eq!((of(99).p90, of(100).p90), (None, Some(90)));
        assert_eq!(of(999).p99, None);
        assert!(of(1000).p99.is_some());
        assert_eq!(of(9_999).p999, None);
        assert!(of(10_000).p999.is_some());
        assert_eq!(Tally::new().finish(), Distribution::default());
    }

    #[test]
    fn a_small_spread_around_a_large_mean_is_seen() {
        // In f64, the sum of squares minus the square of the sum would lose all digits.
        let values: Vec<i64> = (0..1000).map(|i| (1 << 50) + i % 2).collect();
        let tally: Tally = values.iter().copied().collect();
        assert!(near(tally.deviation(), 0.500_250_187, 1e-6));
        assert_eq!(tally.mean(), (1i64 << 50) as f64 + 0.5);
    }

    #[test]
    fn the_ends_of_the_range_do_not_overflow() {
        let mut tally: Tally = [i64::MIN, i64::MAX, 0, -1].into_iter().collect();
        tally.add_n(i64::MIN, u64::from(u32::MAX));
        let all = tally.finish();
        assert_eq!((all.min, all.max), (i64::MIN, i64::MAX));
        assert_eq!(all.p50, Some(i64::MIN));
        assert!(all.deviation.is_finite());
        assert_eq!(tally.sum(), i64::MIN);
    }

    #[test]
    fn curves_rise_and_count_everything() {
        let tally: Tally = (-3000..5000).map(|i| i * 7).collect();
        let curve = tally.finish().buckets;
        assert!(curve.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert_eq!(curve.iter().map(|(_, n)| n).sum::<u64>(), 8000);
        assert_eq!(curve.last().unwrap().0, 4999 * 7);
        for (end, upto) in [(curve[3].0, 4), (curve[curve.len() - 3].0, curve.len() - 2)] {
            let counted: u64 = curve[..upto].iter().map(|(_, n)| n).sum();
            let real = (-3000..5000).filter(|i| i * 7 <= end).count();
            assert_eq!(counted, real as u64, "values up to {end}");
        }
    }

    proptest! {
        #[test]
        fn what_is_said_is_what_a_sorted_list_says(
            mut values in proptest::collection::vec(
                prop_oneof![-1000i64..1000, 0i64..2_000_000_000, -50_000_000i64..0], 20..3000)
        ) {
            let tally: Tally = values.iter().copied().collect();
            let got = tally.finish();
            values.sort_unstable();
            let (mean, deviation) = oracle(&values);
            prop_assert!((got.mean - mean).abs() <= 1e-6 * (1.0 + mean.abs()));
            prop_assert!(near(got.deviation, deviation, 1e-9));
            prop_assert_eq!((got.min, got.max), (values[0], values[values.len() - 1]));
            for (share, got) in [(500, got.p50), (900, got.p90), (990, got.p99)] {
                let rank = (values.len() * share).div_ceil(1000);
                prop_assert_eq!(got.is_some(), values.len() - rank >= 10);
                if let Some(got) = got {
                    let exact = values[rank - 1] as f64;
                    prop_assert!((got as f64 - exact).abs() <= 0.01 * exact.abs(), "{}", share);
                }
            }
        }

        #[test]
        fn merging_is_counting_together(
            a in proptest::collection::vec(-9_000_000i64..9_000_000, 0..200),
            b in proptest::collection::vec(-9_000_000i64..9_000_000, 0..200),
        ) {
            let mut merged: Tally = a.iter().copied().collect();
            merged.merge(&b.iter().copied().collect());
            let together: Tally = a.into_iter().chain(b).collect();
            prop_assert_eq!(merged.finish(), together.finish());
            prop_assert_eq!(merged.sum(), together.sum());
        }
    }
}
