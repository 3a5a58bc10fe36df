//! Medians over rounds, and their intervals. The round is the unit: all events within a round make
//! one figure.
//!
//! The ends of a median's interval are two of its rounds (order statistics). Each round lies below
//! the true median with a probability of one half, so the number of rounds on each side that are
//! left out has a binomial distribution. The rounds themselves may have any distribution.

/// Minimum number of rounds for a 95% interval. With fewer, the interval is minimum to maximum.
pub const ENOUGH: usize = 6;
/// Probability beyond each end of an interval.
const TAIL: f64 = 0.025;

/// Low end, high end.
pub type Interval = (f64, f64);
/// Figures by round, sorted by round.
pub type Rounds = Vec<(u32, f64)>;

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

/// Returns the interval of the median of sorted values.
pub(super) fn interval(sorted: &[f64]) -> Option<Interval> {
    let n = sorted.len();
    match n {
        0 | 1 => None,
        2..ENOUGH => Some((sorted[0], sorted[n - 1])),
        _ => {
            let outside = outside(n);
            Some((sorted[outside], sorted[n - 1 - outside]))
        }
    }
}

/// Returns the number of rounds beyond each end of a median's interval.
///
/// This number is the greatest for which that many heads or fewer of `n` coins have a probability
/// of at most [`TAIL`].
fn outside(n: usize) -> usize {
    // The sums of logarithms do not overflow.
    let (mut ways, mut sum) = (-(n as f64) * 2f64.ln(), 0.0);
    for heads in 0..n {
        sum += ways.exp();
        if sum > TAIL {
            return heads.saturating_sub(1);
        }
        ways += ((n - heads) as f64 / (heads + 1) as f64).ln();
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tosses n coins in every way. Returns the share with at most `most` heads.
    fn tossed(n: u32, most: usize) -> f64 {
        let few = |coins: &u32| coins.count_ones() as usize <= most;
        (0..1u32 << n).filter(few).count() as f64 / f64::from(1u32 << n)
    }

    #[test]
    fn intervals_leave_out_as_many_rounds_as_is_rare() {
        for n in 6..=16 {
            let out = outside(n as usize);
            assert!(tossed(n, out) <= TAIL, "{n}: {out}");
            assert!(tossed(n, out + 1) > TAIL, "{n}: {out}");
        }
        // Five rounds would be outside in one of sixteen cases.
        assert!(tossed(5, 0) > TAIL && tossed(6, 0) <= TAIL);
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

    #[test]
    fn few_rounds_tell_their_range_and_one_tells_nothing() {
        assert_eq!(interval(&[1.0]), None);
        assert_eq!(interval(&[1.0, 2.0, 3.0, 9.0]), Some((1.0, 9.0)));
        let nine: Vec<f64> = (1..=9).map(f64::from).collect();
        assert_eq!(interval(&nine), Some((2.0, 8.0)));
    }

    #[test]
    fn absurd_figures_have_no_ratio_and_no_infinity() {
        for (of, to) in [(1.0, 0.0), (1e308, 1e-308), (-1.0, 1.0), (f64::NAN, 1.0)] {
            assert_eq!(ratio(of, to), None);
        }
        let most = [f64::MAX, f64::MAX, f64::INFINITY, f64::NAN];
        let most = sorted(most.into_iter());
        assert_eq!(median(&most), Some(f64::MAX));
    }
}
