//! Exact permutation tests: whether one point differs from another, by how much at least and at
//! most, and how often such a difference appears by chance.
//!
//! If two points do not differ, their values can be exchanged: within each round if the rounds are
//! pairs (Wilcoxon's signed-rank test), and between all rounds of two runs (Wilcoxon's rank-sum
//! test). All exchanges are equally likely. The share of those that are at least as one-sided as
//! the observed rounds is the probability of a false alarm. Exchanges are counted, not drawn, so
//! that the same rounds give the same probability. Ranks instead of values make the tests
//! independent of units, and limit the weight of a single extreme round.
//!
//! Values are logarithms in units of [`UNIT`], rounded to whole numbers. Differences
//! of whole numbers are exact, so equal ratios are ties, and A against B mirrors B against A.

use std::cmp::Ordering;

use crate::cells::statistics::Interval;

/// Probability of a verdict although nothing differs: of a single comparison, or of a family.
pub const FALSE_ALARMS: f64 = 0.05;

/// Unit of the logarithms. Smaller differences are errors of rounding.
const UNIT: f64 = 1e-9;
/// Most rounds whose exchanges are counted; for more, the normal distribution is exact enough.
const MOST_PAIRS: usize = 50;
/// The same for the rounds of two runs together.
const MOST_OF_RUNS: usize = 40;

/// The result of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tested {
    /// Probability of a difference of at least this size in either direction, if nothing differs.
    pub(super) p: f64,
    /// Direction of the difference.
    pub(super) direction: Ordering,
}

/// Returns the logarithm of a value that is not negative.
pub(super) fn logarithm(value: f64) -> f64 {
    (value.ln() / UNIT).round()
}

/// Returns the difference of two logarithms; two values of 0 are equal.
pub(super) fn difference(of: f64, to: f64) -> f64 {
    if of == to { 0.0 } else { of - to }
}

fn ratio(difference: f64) -> f64 {
    (difference * UNIT).exp()
}

/// Tests the differences of pairs.
pub(super) fn pairs(differences: &[f64]) -> Tested {
    let differs = |one: &&f64| one.abs() > 1.0;
    let signed: Vec<f64> = differences.iter().filter(differs).copied().collect();
    let sizes: Vec<f64> = signed.iter().map(|one| one.abs()).collect();
    let ranks = ranks(&sizes);
    let all: usize = ranks.iter().sum();
    let positive = ranks.iter().zip(&signed).filter(|(_, one)| **one > 0.0);
    let positive: usize = positive.map(|(rank, _)| rank).sum();
    let low = positive.min(all - positive);
    let p = match signed.len() <= MOST_PAIRS {
        true => 2.0 * below(&subsets(&ranks), low),
        false => {
            let squares = ranks.iter().map(|rank| (*rank as f64).powi(2));
            normal(all as f64 / 2.0 - low as f64, squares.sum::<f64>() / 4.0)
        }
    };
    Tested {
        p: p.min(1.0),
        direction: positive.cmp(&(all - positive)),
    }
}

/// Tests the logarithms of two runs: `of` against `to`.
pub(super) fn runs(of: &[f64], to: &[f64]) -> Tested {
    let ranks = ranks(&[of, to].concat());
    let count = ranks.len();
    let all: usize = ranks.iter().sum();
    let sum: usize = ranks[..of.len()].iter().sum();
    let direction = (sum * count).cmp(&(all * of.len()));
    let (chosen, sum) = match of.len() <= to.len() {
        true => (of.len(), sum),
        false => (to.len(), all - sum),
    };
    let p = match count <= MOST_OF_RUNS {
        true => {
            let chances = choices(&ranks, chosen);
            let above = 1.0 - below(&chances, sum) + chances.get(sum).unwrap_or(&0.0);
            2.0 * below(&chances, sum).min(above)
        }
        false => {
            let mean = all as f64 / count as f64;
            let squares = ranks.iter().map(|rank| (*rank as f64 - mean).powi(2));
            let part = (chosen * (count - chosen)) as f64 / (count * (count - 1)) as f64;
            let distance = (sum as f64 - mean * chosen as f64).abs();
            normal(distance, squares.sum::<f64>() * part)
        }
    };
    Tested {
        p: p.min(1.0),
        direction,
    }
}

/// Returns the smallest probability that this number of pairs can have.
pub(super) fn least_of_pairs(pairs: u32) -> f64 {
    2f64.powi(1 - pairs.min(1000) as i32).min(1.0)
}

/// Returns the smallest probability that two runs with these numbers of rounds can have.
pub(super) fn least_of_runs(of: u32, to: u32) -> f64 {
    let factors = (1..=of.min(to)).map(|i| f64::from(i) / f64::from(of.max(to) + i));
    (2.0 * factors.product::<f64>()).min(1.0)
}

/// Returns the ratios that the test of these pairs does not exclude, in 95% of all cases; `None`
/// if there are too few pairs, or if a ratio is 0 or infinite.
pub(super) fn interval_of_pairs(differences: &[f64]) -> Option<Interval> {
    let count = differences.len();
    let all = count * (count + 1) / 2;
    let outside = match count <= MOST_PAIRS {
        true => excluded(&subsets(&(1..=count).collect::<Vec<_>>()))?,
        false => {
            let n = count as f64;
            let deviation = (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
            (all as f64 / 2.0 - DEVIATIONS * deviation - 0.5) as usize
        }
    };
    // The means of all pairs of differences (Walsh averages; Hodges and Lehmann).
    let means = differences.iter().enumerate();
    let means = means.flat_map(|(i, one)| {
        let others = differences[i..].iter();
        others.map(move |other| one.midpoint(*other))
    });
    ends(means.collect(), outside)
}

/// Returns the ratios that the test of these two runs does not exclude; otherwise like
/// [`interval_of_pairs`].
pub(super) fn interval_of_runs(of: &[f64], to: &[f64]) -> Option<Interval> {
    let (a, b) = (of.len(), to.len());
    let outside = match a + b <= MOST_OF_RUNS {
        true => {
            // The sum of the lowest ranks counts no value of the other run below.
            let chances = choices(&(1..=a + b).collect::<Vec<_>>(), a);
            excluded(chances.get(a * (a + 1) / 2..)?)?
        }
        false => {
            let variance = (a * b * (a + b + 1)) as f64 / 12.0;
            let outside = (a * b) as f64 / 2.0 - DEVIATIONS * variance.sqrt() - 0.5;
            (outside >= 0.0).then_some(outside as usize)?
        }
    };
    let each = of
        .iter()
        .flat_map(|one| to.iter().map(move |other| one - other));
    ends(each.collect(), outside)
}

/// Number of standard deviations that 95% of a normal distribution lie within.
const DEVIATIONS: f64 = 1.96;

/// Returns how many of the least and of the greatest differences lie outside of the interval: the
/// greatest count that is rare enough.
fn excluded(chances: &[f64]) -> Option<usize> {
    let mut sum = 0.0;
    let common = chances.iter().position(|chance| {
        sum += chance;
        2.0 * sum > FALSE_ALARMS
    });
    common?.checked_sub(1)
}

fn ends(mut differences: Vec<f64>, outside: usize) -> Option<Interval> {
    differences.sort_by(f64::total_cmp);
    let high = differences.len().checked_sub(outside + 1)?;
    let (low, high) = (
        ratio(*differences.get(outside)?),
        ratio(*differences.get(high)?),
    );
    (low > 0.0 && high.is_finite()).then_some((low, high))
}

/// Returns twice the rank of each value, from 2; equal values share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0; values.len()];
    let mut before = 0;
    for equal in order.chunk_by(|a, b| values[*a] == values[*b]) {
        for at in equal {
            ranks[*at] = 2 * before + equal.len() + 1;
        }
        before += equal.len();
    }
    ranks
}

/// Returns the probability of each sum of some of the parts, if each part belongs to it or not by
/// the toss of a coin.
fn subsets(parts: &[usize]) -> Vec<f64> {
    let mut chances = vec![1.0];
    for part in parts {
        let mut next = vec![0.0; chances.len() + part];
        for (sum, chance) in chances.iter().enumerate() {
            next[sum] += chance / 2.0;
            next[sum + part] += chance / 2.0;
        }
        chances = next;
    }
    chances
}

/// Returns the probability of each sum of `count` of the parts, drawn without replacement.
fn choices(parts: &[usize], count: usize) -> Vec<f64> {
    let most: usize = parts.iter().sum();
    // The number of ways by the number of parts, then by their sum.
    let mut ways = vec![vec![0.0; most + 1]; count + 1];
    ways[0][0] = 1.0;
    for part in parts {
        for chosen in (1..=count).rev() {
            let (fewer, more) = ways.split_at_mut(chosen);
            let pairs = more[0].iter_mut().skip(*part).zip(&fewer[chosen - 1]);
            pairs.for_each(|(ways, before)| *ways += before);
        }
    }
    let mut chances = ways.swap_remove(count);
    let all: f64 = chances.iter().sum();
    chances.iter_mut().for_each(|ways| *ways /= all);
    chances
}

/// Returns the probability of a sum of at most `sum`.
fn below(chances: &[f64], sum: usize) -> f64 {
    chances.iter().take(sum + 1).sum()
}

/// Returns the probability of a sum at least this far from its mean, by the normal distribution.
/// Sums are whole numbers of half ranks, and half a step belongs to each.
fn normal(distance: f64, variance: f64) -> f64 {
    if variance <= 0.0 {
        return 1.0;
    }
    complement((distance - 1.0).max(0.0) / (2.0 * variance).sqrt())
}

/// Returns the complementary error function of `x`, which is not negative. The relative error is
/// below 1.2e-7 (Numerical Recipes, erfcc).
fn complement(x: f64) -> f64 {
    const TERMS: [f64; 10] = [
        -1.265_512_23,
        1.000_023_68,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_203_98,
        1.488_515_87,
        -0.822_152_23,
        0.170_872_77,
    ];
    let t = 1.0 / (1.0 + x / 2.0);
    let terms = TERMS.iter().rev().fold(0.0, |sum, term| sum * t + term);
    t * (terms - x * x).exp()
}

#[cfg(test)]
mod tests;
