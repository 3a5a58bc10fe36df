//! The effect of a change on a measure, with an interval.

/// Confidence that an interval has at least, if there are enough pairs of rounds.
const CONFIDENCE: f64 = 0.95;

/// The effect of a change on a measure: the value with the change divided by the value without it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effect {
    /// Median of the pairs' ratios.
    pub ratio: f64,
    /// Lower end of the interval of the median.
    pub low: f64,
    /// Upper end of the interval of the median.
    pub high: f64,
    /// Probability that the interval contains the median, from 0 to 1; below 0.95 with fewer than
    /// six pairs.
    pub confidence: f64,
    /// Number of pairs of rounds.
    pub pairs: usize,
}

/// Returns the effect from the ratios of pairs of rounds, or `None` without a ratio.
///
/// The interval is the exact one of the sign test, from one ratio to another in order:
///
/// ```text
/// [k-th smallest, k-th largest], with the largest k for which 1 - 2 P(B < k) >= 0.95
/// B: number of heads of as many throws of a coin as there are pairs
/// ```
///
/// The interval holds for any distribution, if the pairs are independent. Ratios that are not
/// positive numbers are left out.
pub fn effect(ratios: &[f64]) -> Option<Effect> {
    let is_ratio = |ratio: &f64| *ratio > 0.0 && ratio.is_finite();
    let mut sorted: Vec<f64> = ratios.iter().copied().filter(is_ratio).collect();
    sorted.sort_by(f64::total_cmp);
    let pairs = sorted.len();
    let (first, last) = (*sorted.first()?, *sorted.last()?);
    let (mut cut, mut confidence) = (0, coverage(pairs, 0));
    while coverage(pairs, cut + 1) >= CONFIDENCE {
        cut += 1;
        confidence = coverage(pairs, cut);
    }
    let at = |index: usize| sorted.get(index).copied();
    Some(Effect {
        ratio: f64::midpoint(at((pairs - 1) / 2)?, at(pairs / 2)?),
        low: at(cut).unwrap_or(first),
        high: at(pairs - 1 - cut).unwrap_or(last),
        confidence,
        pairs,
    })
}

/// Returns the probability that the median lies between the ratios that remain if `cut` ratios are
/// left out at each end.
fn coverage(pairs: usize, cut: usize) -> f64 {
    // P(exactly `heads` of `pairs`), from the one for fewer heads.
    let mut exactly = 0.5_f64.powi(i32::try_from(pairs).unwrap_or(i32::MAX));
    let mut below = 0.0;
    for heads in 0..=cut.min(pairs) {
        below += exactly;
        exactly *= (pairs - heads) as f64 / (heads + 1) as f64;
    }
    (1.0 - 2.0 * below).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn six_pairs_are_enough_for_an_interval_of_all() {
        let found = effect(&[1.1, 1.3, 1.2, 1.6, 1.5, 1.4]).unwrap();
        assert!((found.ratio - 1.35).abs() < 1e-9);
        assert_eq!((found.low, found.high, found.pairs), (1.1, 1.6, 6));
        assert!((found.confidence - (1.0 - 2.0 / 64.0)).abs() < 1e-12);
    }

    #[test]
    fn outliers_are_left_out_with_more_pairs() {
        // With nine pairs, P(at most one head) is 10 of 512.
        let found = effect(&[0.01, 1.0, 1.0, 1.1, 1.1, 1.1, 1.2, 1.2, 50.0]).unwrap();
        assert_eq!((found.ratio, found.low, found.high), (1.1, 1.0, 1.2));
        assert!((found.confidence - (1.0 - 20.0 / 512.0)).abs() < 1e-12);
    }

    #[test]
    fn few_pairs_have_less_confidence() {
        assert_eq!(effect(&[]), None);
        assert_eq!(effect(&[f64::NAN, 0.0, -1.0, f64::INFINITY]), None);
        assert_eq!(effect(&[1.5]).unwrap().confidence, 0.0);
        assert_eq!(effect(&[1.5, 1.4]).unwrap().confidence, 0.5);
    }

    proptest! {
        #[test]
        fn the_median_is_in_the_interval(ratios in vec(0.1..10.0f64, 1..40)) {
            let found = effect(&ratios).unwrap();
            prop_assert!(found.low <= found.ratio && found.ratio <= found.high);
            prop_assert!((0.0..=1.0).contains(&found.confidence));
            prop_assert!(ratios.len() < 6 || found.confidence >= CONFIDENCE);
        }
    }
}
