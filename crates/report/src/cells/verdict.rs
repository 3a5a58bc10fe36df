//! Verdicts of comparisons: the one place that decides whether a point is better or worse than
//! another. All tables, sentences and rankings show these verdicts.
//!
//! A comparison is tested by its rounds ([`permutation`]). Comparisons that stand next to each
//! other are a family: a measure's ratios of all points, or all sentences about effects. If nothing
//! differs, at most [`FALSE_ALARMS`] of all families have a verdict, not of all comparisons: the
//! probabilities are corrected by Holm's method. A comparison that no result could decide has too
//! few rounds, and says how many more it needs.

mod permutation;

use std::cmp::Ordering;

use fathom_run::Better;
use serde::Serialize;

use super::statistics::{Interval, Rounds, median, ratio, sorted};
pub use permutation::FALSE_ALARMS;
use permutation::{Tested, difference, logarithm};

/// Maximum number of missing rounds that is counted.
const MOST_MORE: u32 = 1000;

/// The result of a comparison, as far as the rounds show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Verdict {
    /// The point is better than its base: faster, or cheaper.
    Better,
    /// The point is worse than its base.
    Worse,
    /// The rounds are enough for a verdict, and show neither.
    NoDifferenceShown,
    /// No result of so few rounds would be a verdict.
    NotEnoughRounds {
        /// Number of rounds to add; to each run, if two runs are compared.
        more: u32,
    },
}

impl Verdict {
    /// Returns the name that JSON has for the state.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::NoDifferenceShown => "no_difference_shown",
            Verdict::NotEnoughRounds { .. } => "not_enough_rounds",
        }
    }

    /// Returns whether the rounds show a difference.
    pub fn is_difference(self) -> bool {
        matches!(self, Verdict::Better | Verdict::Worse)
    }
}

/// A ratio of two points' figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// Median of the rounds' ratios, or ratio of the medians if the rounds are unrelated.
    pub median: f64,
    /// 95% interval if there are enough rounds for this comparison alone, else minimum to maximum;
    /// `None` with one round.
    pub interval: Option<Interval>,
    /// Probability of a difference of at least this size if nothing differs, for this comparison
    /// alone.
    pub p: f64,
    /// The verdict, with regard to all comparisons of the family.
    pub verdict: Verdict,
}

/// A comparison before its verdict, which depends on the other comparisons of its family.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Unjudged {
    median: f64,
    interval: Option<Interval>,
    tested: Tested,
    sample: Sample,
}

/// Numbers of rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sample {
    /// Rounds that both points have.
    Pairs(u32),
    /// Rounds of each of two runs.
    Runs(u32, u32),
}

impl Unjudged {
    /// Compares figures of the same rounds: the median of each round's own ratio.
    pub(super) fn paired(of: &Rounds, to: &Rounds) -> Option<Unjudged> {
        let pair = |(round, value): &(u32, f64)| {
            let at = to.binary_search_by_key(round, |(round, _)| *round).ok()?;
            Some((*value, to[at].1, ratio(*value, to[at].1)?))
        };
        let pairs: Vec<(f64, f64, f64)> = of.iter().filter_map(pair).collect();
        let ratios = sorted(pairs.iter().map(|(_, _, ratio)| *ratio));
        let differences = pairs.iter();
        let differences = differences.map(|(of, to, _)| difference(logarithm(*of), logarithm(*to)));
        let differences: Vec<f64> = differences.collect();
        let interval = permutation::interval_of_pairs(&differences).or_else(|| range(&ratios));
        let sample = Sample::Pairs(rounds(&pairs));
        let tested = permutation::pairs(&differences);
        Some(Unjudged::new(middle(&ratios)?, interval, tested, sample))
    }

    /// Compares figures of two runs, whose rounds are unrelated: the ratio of the medians. Returns
    /// `None` if a figure is negative.
    pub(super) fn unpaired(of: &Rounds, to: &Rounds) -> Option<Unjudged> {
        let values = |rounds: &Rounds| sorted(rounds.iter().map(|(_, value)| *value));
        let (of, to) = (values(of), values(to));
        if of.iter().chain(&to).any(|value| *value < 0.0) {
            return None;
        }
        let middle = ratio(median(&of)?, median(&to)?)?;
        let sample = Sample::Runs(rounds(&of), rounds(&to));
        let logarithms = |values: &[f64]| values.iter().map(|one| logarithm(*one)).collect();
        let (a, b): (Vec<f64>, Vec<f64>) = (logarithms(&of), logarithms(&to));
        let widest = || match of.len().min(to.len()) {
            1 => None,
            _ => ratio(of[0], to[to.len() - 1]).zip(ratio(of[of.len() - 1], to[0])),
        };
        let interval = permutation::interval_of_runs(&a, &b).or_else(widest);
        let tested = permutation::runs(&a, &b);
        Some(Unjudged::new(middle, interval, tested, sample))
    }

    fn new(median: f64, interval: Option<Interval>, tested: Tested, sample: Sample) -> Unjudged {
        Unjudged {
            median,
            interval: interval.map(|(low, high)| (low.min(median), high.max(median))),
            tested,
            sample,
        }
    }

    /// Returns the verdict if the difference is not chance. Returns `None` if the ranks and the
    /// median disagree, which very skewed rounds can cause.
    fn direction(&self, better: Better) -> Option<Verdict> {
        let direction = self.median.total_cmp(&1.0);
        if direction == Ordering::Equal || direction != self.tested.direction {
            return None;
        }
        let is_better = direction.is_gt() == (better == Better::Higher);
        Some(if is_better {
            Verdict::Better
        } else {
            Verdict::Worse
        })
    }
}

/// Judges the comparisons of a family, in their order. `better` is the direction of the measure.
pub(super) fn judge(family: Vec<Unjudged>, better: Better) -> Vec<Ratio> {
    let probabilities: Vec<f64> = family.iter().map(|one| one.tested.p).collect();
    let corrected = holm(&probabilities);
    let count = family.len() as f64;
    let ratios = family.into_iter().zip(corrected);
    let ratios = ratios.map(|(one, corrected)| {
        let shown = (corrected <= FALSE_ALARMS).then(|| one.direction(better));
        let not_shown = || match one.sample.missing(FALSE_ALARMS / count) {
            0 => Verdict::NoDifferenceShown,
            more => Verdict::NotEnoughRounds { more },
        };
        Ratio {
            verdict: shown.flatten().unwrap_or_else(not_shown),
            median: one.median,
            interval: one.interval,
            p: one.tested.p,
        }
    });
    ratios.collect()
}

/// Corrects the probabilities of a family's comparisons (Holm 1979): the smallest is multiplied by
/// the number of comparisons, the next by one less, and none becomes less than the one before.
fn holm(probabilities: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|a, b| probabilities[*a].total_cmp(&probabilities[*b]));
    let mut corrected = vec![1.0; probabilities.len()];
    let mut most = 0.0;
    for (before, at) in order.into_iter().enumerate() {
        let others = (probabilities.len() - before) as f64;
        most = f64::max(most, (probabilities[at] * others).min(1.0));
        corrected[at] = most;
    }
    corrected
}

impl Sample {
    /// Returns the number of rounds without which no result is as improbable as `probability`.
    fn missing(self, probability: f64) -> u32 {
        let is_enough = |more: &u32| {
            let least = match self {
                Sample::Pairs(pairs) => permutation::least_of_pairs(pairs + more),
                Sample::Runs(of, to) => permutation::least_of_runs(of + more, to + more),
            };
            least <= probability
        };
        (0..MOST_MORE).find(is_enough).unwrap_or(MOST_MORE)
    }
}

/// Returns the median of sorted ratios. If two are in the middle, the median is their geometric
/// mean, so that A/B is the inverse of B/A.
fn middle(sorted: &[f64]) -> Option<f64> {
    let n = sorted.len();
    let upper = *sorted.get(n / 2)?;
    match n % 2 {
        1 => Some(upper),
        _ => Some(sorted[n / 2 - 1].sqrt() * upper.sqrt()),
    }
}

fn rounds<T>(of: &[T]) -> u32 {
    u32::try_from(of.len()).unwrap_or(u32::MAX - MOST_MORE)
}

fn range(sorted: &[f64]) -> Option<Interval> {
    match sorted {
        [] | [_] => None,
        [low, .., high] => Some((*low, *high)),
    }
}

#[cfg(test)]
impl Ratio {
    /// Creates a ratio with an interval of 10% to each side, for tests of texts.
    pub(super) fn told(median: f64, verdict: Verdict) -> Ratio {
        Ratio {
            median,
            interval: Some((median * 0.9, median * 1.1)),
            p: 0.01,
            verdict,
        }
    }
}

#[cfg(test)]
mod tests;
