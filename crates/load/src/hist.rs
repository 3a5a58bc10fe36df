//! A log-linear histogram: constant relative error, one increment per sample.

use crate::clock::{Scale, Ticks};

/// 128 sub-buckets per power of two: a value is off by at most 0.4 %.
const SUB_BITS: u32 = 7;
const SUB: usize = 1 << SUB_BITS;
/// Samples of 2^44 ticks (more than an hour) and above share the last bucket.
const MAX_BITS: u32 = 44;
const BUCKETS: usize = (MAX_BITS - SUB_BITS + 1) as usize * SUB;

/// Latencies in ticks.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64]>,
    sum: u64,
    count: u64,
    max: Ticks,
}

/// The figures that are reported, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Summary {
    pub mean_ns: f64,
    pub p50_ns: f64,
    pub p90_ns: f64,
    pub p99_ns: f64,
    pub p999_ns: f64,
    pub max_ns: f64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            counts: vec![0; BUCKETS].into_boxed_slice(),
            sum: 0,
            count: 0,
            max: 0,
        }
    }
}

/// Values below `SUB` have a bucket each; above, the top bits after the
/// leading one choose the bucket within its power of two.
#[inline(always)]
fn bucket(value: Ticks) -> usize {
    let value = value.min((1 << MAX_BITS) - 1);
    let shift = (64 - SUB_BITS - 1).saturating_sub(value.leading_zeros().min(63));
    (shift as usize) * SUB + (value >> shift) as usize
}

/// The middle of a bucket.
fn middle(bucket: usize) -> f64 {
    if bucket < 2 * SUB {
        return bucket as f64;
    }
    let shift = bucket / SUB - 1;
    let low = ((bucket - shift * SUB) as u64) << shift;
    low as f64 + ((1u64 << shift) - 1) as f64 / 2.0
}

impl Histogram {
    /// Adds one sample.
    #[inline(always)]
    pub fn record(&mut self, ticks: Ticks) {
        self.counts[bucket(ticks)] += 1;
        self.sum += ticks;
        self.count += 1;
        self.max = self.max.max(ticks);
    }

    /// Adds all samples of `other`.
    pub fn merge(&mut self, other: &Histogram) {
        for (a, b) in self.counts.iter_mut().zip(&other.counts) {
            *a += b;
        }
        self.sum += other.sum;
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    /// Number of samples.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The smallest value that at least `share` of the samples do not pass.
    fn quantile(&self, share: f64) -> f64 {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (i, n) in self.counts.iter().enumerate() {
            seen += n;
            if seen >= rank {
                return middle(i).min(self.max as f64);
            }
        }
        self.max as f64
    }

    /// The report's figures; all zero without samples.
    pub fn summary(&self, scale: Scale) -> Summary {
        if self.count == 0 {
            return Summary::default();
        }
        let ns = |ticks: f64| ticks * scale.ns(1);
        Summary {
            mean_ns: ns(self.sum as f64 / self.count as f64),
            p50_ns: ns(self.quantile(0.50)),
            p90_ns: ns(self.quantile(0.90)),
            p99_ns: ns(self.quantile(0.99)),
            p999_ns: ns(self.quantile(0.999)),
            max_ns: ns(self.max as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_their_middles_close() {
        let mut last = 0;
        for value in (0..20_000u64).chain((15..43).flat_map(|b| [(1 << b) - 1, 1 << b, 3 << b])) {
            let b = bucket(value);
            assert!(value > 20_000 || b == last || b == last + 1, "{value}");
            last = b;
            let error = (middle(b) - value as f64).abs();
            assert!(error <= value as f64 * 0.004, "{value}: {}", middle(b));
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_equal_those_of_the_sorted_samples() {
        let mut h = Histogram::default();
        let mut samples: Vec<u64> = (0..50_000u64).map(|i| (i * 7919) % 1_000_003).collect();
        samples.iter().for_each(|s| h.record(*s));
        samples.sort_unstable();
        for share in [0.5, 0.9, 0.99, 0.999] {
            let exact = samples[(50_000.0 * share) as usize - 1] as f64;
            let ours = h.quantile(share);
            assert!((ours - exact).abs() <= exact * 0.005 + 1.0, "{share}");
        }
        assert_eq!(h.max, *samples.last().unwrap());
        let mut twice = h.clone();
        twice.merge(&h);
        assert_eq!(twice.count(), 100_000);
        assert_eq!(twice.quantile(0.9), h.quantile(0.9));
    }
}
