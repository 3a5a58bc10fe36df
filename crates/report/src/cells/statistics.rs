//! Medians over rounds, and their intervals. The round is the unit: all events within a round make
//! one figure.
//!
//! Intervals come from the percentile bootstrap of the median. The distribution of the resamples is
//! computed, not drawn. The k-th smallest of n draws is among the i smallest values with a
//! probability from the binomial distribution. The same rounds give the same interval, without a
//! seed.

use serde::Serialize;

/// Minimum number of rounds for a 95% interval. With fewer, the interval is minimum to maximum.
pub const ENOUGH: usize = 5;
/// Probability beyond each end of an interval.
const TAIL: f64 = 0.025;
/// Probability below which a value is ignored.
const NEGLIGIBLE: f64 = 1e-9;

/// Low end, high end.
pub type Interval = (f64, f64);
/// Figures by round, sorted by round.
pub type Rounds = Vec<(u32, f64)>;

/// A ratio of two points' figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// Median of the rounds' ratios, or ratio of the medians if the rounds are unrelated.
    pub median: f64,
    /// 95% interval from [`ENOUGH`] rounds on, else minimum to maximum; `None` with one round.
    pub interval: Option<Interval>,
    /// Whether the interval contains 1.
    pub within_noise: Option<bool>,
}

impl Ratio {
    /// Compares figures of the same rounds: the median of each round's own ratio.
    pub(super) fn paired(of: &Rounds, to: &Rounds) -> Option<Ratio> {
        let pair = |(round, value): &(u32, f64)| {
            let at = to.binary_search_by_key(round, |(round, _)| *round).ok()?;
            ratio(*value, to[at].1)
        };
        let sorted = sorted(of.iter().filter_map(pair));
        Some(Ratio::new(median(&sorted)?, interval(&sorted)))
    }

    /// Compares figures of two runs, whose rounds are unrelated: the ratio of the medians.
    pub(super) fn unpaired(of: &Rounds, to: &Rounds) -> Option<Ratio> {
        let of = sorted(of.iter().map(|(_, value)| *value));
        let to = sorted(to.iter().map(|(_, value)| *value));
        let median = ratio(median(&of)?, median(&to)?)?;
        let interval = match of.len().min(to.len()) {
            1 => None,
            2..ENOUGH => ratio(of[0], to[to.len() - 1]).zip(ratio(of[of.len() - 1], to[0])),
            _ => low_ratio(&of, &to).zip(high_ratio(&of, &to)),
        };
        Some(Ratio::new(median, interval))
    }

    fn new(median: f64, interval: Option<Interval>) -> Ratio {
        Ratio {
            median,
            interval,
            within_noise: interval.map(|(low, high)| low <= 1.0 && 1.0 <= high),
        }
    }
}

/// Returns the ratio if it is meaningful: `of` is not negative, `to` is positive, and the ratio is
/// finite.
pub(super) fn ratio(of: f64, to: f64) -> Option<f64> {
    let ratio = of / to;
    (of >= 0.0 && to > 0.0 && ratio.is_finite()).then_some(ratio)
}

pub(super) fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Returns the median of sorted values.
pub(super) fn median(sorted: &[f64]) -> Option<f64> {
    let n = sorted.len();
    let upper = *sorted.get(n / 2)?;
    match n % 2 {
        1 => Some(upper),
        // Halve first: the sum of the two could overflow.
        _ => Some(sorted[n / 2 - 1] / 2.0 + upper / 2.0),
    }
}

/// Returns the interval of the median of sorted values. With an even number of values, it reaches
/// from the low end of the lower middle value to the high end of the upper one.
pub(super) fn interval(sorted: &[f64]) -> Option<Interval> {
    let n = sorted.len();
    match n {
        0 | 1 => None,
        2..ENOUGH => Some((sorted[0], sorted[n - 1])),
        _ => {
            let draws = Draws::new(n, (n - 1) / 2);
            let (mut low, mut high) = (1, n);
            while low < high {
                let middle = low.midpoint(high);
                match draws.chance_below(middle) < TAIL {
                    true => low = middle + 1,
                    false => high = middle,
                }
            }
            // The high end is the mirror image of the low end.
            Some((sorted[low - 1], sorted[n - low]))
        }
    }
}

/// Returns the low end of the ratio of two medians.
fn low_ratio(of: &[f64], to: &[f64]) -> Option<f64> {
    let mut all = ratios((of, (of.len() - 1) / 2), (to, to.len() / 2));
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    tail(&all)
}

/// Returns the high end of the ratio of two medians.
fn high_ratio(of: &[f64], to: &[f64]) -> Option<f64> {
    let mut all = ratios((of, of.len() / 2), (to, (to.len() - 1) / 2));
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    tail(&all)
}

/// Returns every ratio of resampled values of these ranks, with its probability.
fn ratios(of: (&[f64], usize), to: (&[f64], usize)) -> Vec<(f64, f64)> {
    let of = chances(of.0, of.1);
    let to = chances(to.0, to.1);
    let pairs = of.iter().flat_map(|a| to.iter().map(move |b| (a, b)));
    pairs.map(|(a, b)| (a.0 / b.0, a.1 * b.1)).collect()
}

/// Returns the value at which the cumulative probability reaches [`TAIL`].
fn tail(chances: &[(f64, f64)]) -> Option<f64> {
    let mut sum = 0.0;
    let reached = chances.iter().find(|(_, chance)| {
        sum += chance;
        sum >= TAIL
    });
    reached
        .map(|(value, _)| *value)
        .filter(|value| value.is_finite())
}

/// Returns the values with the probability that a resample has them at this rank.
fn chances(sorted: &[f64], rank: usize) -> Vec<(f64, f64)> {
    let draws = Draws::new(sorted.len(), rank);
    let mut before = 0.0;
    let chance = |(i, value): (usize, &f64)| {
        let below = draws.chance_below(i + 1);
        let chance = below - std::mem::replace(&mut before, below);
        (*value, chance)
    };
    let all = sorted.iter().enumerate().map(chance);
    all.filter(|(_, chance)| *chance > NEGLIGIBLE).collect()
}

/// Resamples of `n` values, and one rank of them (0 is the smallest).
struct Draws {
    n: usize,
    rank: usize,
    /// The logarithm of the number of ways to choose rank + 1 of n.
    ways: f64,
}

impl Draws {
    fn new(n: usize, rank: usize) -> Draws {
        let ways = (0..=rank).map(|i| ((n - i) as f64 / (i + 1) as f64).ln());
        Draws {
            n,
            rank,
            ways: ways.sum(),
        }
    }

    /// Returns the probability that the value of the rank is one of the `k` smallest, which is the
    /// probability that more than `rank` of n draws are.
    fn chance_below(&self, k: usize) -> f64 {
        if k == 0 || k >= self.n {
            return if k == 0 { 0.0 } else { 1.0 };
        }
        let n = self.n as f64;
        let (p, q) = (k as f64 / n, (self.n - k) as f64 / n);
        let first = self.rank + 1;
        let log = self.ways + first as f64 * p.ln() + (self.n - first) as f64 * q.ln();
        // Sum the terms away from the most likely number, so that they decrease.
        let (mut term, mut sum) = (log.exp(), 0.0);
        if k * 2 <= self.n {
            for drawn in first..=self.n {
                sum += term;
                term *= (self.n - drawn) as f64 / (drawn + 1) as f64 * p / q;
                if term < sum * f64::EPSILON {
                    break;
                }
            }
            return sum;
        }
        for drawn in (0..first).rev() {
            term *= (drawn + 1) as f64 / (self.n - drawn) as f64 * q / p;
            sum += term;
            if term < sum * f64::EPSILON {
                break;
            }
        }
        1.0 - sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enumerates every resample of n values. Returns the share of them whose value of a rank is
    /// among the k smallest.
    fn counted(n: usize, rank: usize, k: usize) -> f64 {
        let all = n.pow(n as u32);
        let is_below = |number: &usize| {
            let mut rest = *number;
            let mut drawn: Vec<usize> = Vec::new();
            for _ in 0..n {
                drawn.push(rest % n);
                rest /= n;
            }
            drawn.sort_unstable();
            drawn[rank] < k
        };
        (0..all).filter(is_below).count() as f64 / all as f64
    }

    #[test]
    fn resamples_are_counted_as_if_they_were_drawn() {
        for n in [1, 2, 5, 6] {
            for rank in [(n - 1) / 2, n / 2] {
                let draws = Draws::new(n, rank);
                for k in 0..=n {
                    let (told, counted) = (draws.chance_below(k), counted(n, rank, k));
                    assert!((told - counted).abs() < 1e-12, "{n} {rank} {k}: {told}");
                }
            }
        }
    }

    #[test]
    fn many_rounds_are_as_the_theory_has_them() {
        // The ranks of a median's interval: n / 2 +- 1.96 sqrt(n) / 2.
        let values: Vec<f64> = (0..100_001).map(f64::from).collect();
        let (low, high) = interval(&values).unwrap();
        assert_eq!(median(&values), Some(50_000.0));
        assert!((low - 50_000.0 + 309.9).abs() < 2.0, "{low}");
        assert!((high - 50_000.0 - 309.9).abs() < 2.0, "{high}");
    }

    fn rounds(values: &[f64]) -> Rounds {
        (1..).zip(values.iter().copied()).collect()
    }

    #[test]
    fn pairs_see_through_a_drift_that_hides_a_difference() {
        // The machine becomes slower with each round; one point takes 10% longer than the other.
        let base: Vec<f64> = (0..10).map(|i| 100.0 + 20.0 * f64::from(i)).collect();
        let more: Vec<f64> = base.iter().map(|value| value * 1.1).collect();
        let (base, more) = (rounds(&base), rounds(&more));
        let paired = Ratio::paired(&more, &base).unwrap();
        assert_eq!(paired.within_noise, Some(false));
        assert!((paired.median - 1.1).abs() < 1e-12);
        let unpaired = Ratio::unpaired(&more, &base).unwrap();
        assert_eq!(unpaired.within_noise, Some(true));
        // Rounds that only one of them has do not count.
        assert_eq!(
            Ratio::paired(&more, &base[3..4].to_vec()).unwrap().interval,
            None
        );
        assert_eq!(Ratio::paired(&more, &vec![(11, 1.0)]), None);
    }

    #[test]
    fn few_rounds_tell_their_range_and_one_tells_nothing() {
        assert_eq!(interval(&[1.0]), None);
        assert_eq!(interval(&[1.0, 2.0, 3.0, 9.0]), Some((1.0, 9.0)));
        let two = Ratio::unpaired(&rounds(&[4.0, 6.0]), &rounds(&[1.0, 2.0])).unwrap();
        assert_eq!(two.interval, Some((2.0, 6.0)));
        let one = Ratio::paired(&rounds(&[4.0]), &rounds(&[2.0])).unwrap();
        assert_eq!(
            (one.median, one.interval, one.within_noise),
            (2.0, None, None)
        );
    }

    #[test]
    fn absurd_figures_have_no_ratio_and_no_infinity() {
        for (of, to) in [(1.0, 0.0), (1e308, 1e-308), (-1.0, 1.0), (f64::NAN, 1.0)] {
            assert_eq!(ratio(of, to), None);
        }
        let most = [f64::MAX, f64::MAX, f64::INFINITY, f64::NAN];
        let most = sorted(most.into_iter());
        assert_eq!(median(&most), Some(f64::MAX));
        let tiny = rounds(&[1e-308; 6]);
        let ratio = Ratio::unpaired(&rounds(&[1e308; 6]), &tiny);
        assert_eq!(ratio, None);
    }

    #[test]
    fn equal_runs_differ_by_noise_in_nineteen_of_twenty() {
        let mut state = 1u64;
        let mut draw = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            100.0 + (state >> 40) as f64 / f64::from(1 << 24)
        };
        let mut told = 0;
        for _ in 0..1000 {
            let a = rounds(&std::array::from_fn::<f64, 11, _>(|_| draw()));
            let b = rounds(&std::array::from_fn::<f64, 11, _>(|_| draw()));
            let ratio = Ratio::unpaired(&a, &b).unwrap();
            told += u32::from(ratio.within_noise == Some(false));
        }
        assert!((10..=90).contains(&told), "{told} of 1000");
    }
}
