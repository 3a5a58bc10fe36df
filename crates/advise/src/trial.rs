//! Judges a change by rounds without and with it.

use crate::effect::{Effect, effect};

/// Minimum gain of a change that is better: less is not worth a change.
const GAIN: f64 = 1.05;
/// Factor by which a percentile of the latency may grow before the trial of a change ends.
const TWICE: f64 = 2.0;

/// Figures of a disk in one round. Times are in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Round {
    /// Requests per second.
    pub iops: f64,
    /// Median of the latency. `None`, here and below: too few requests.
    pub p50_us: Option<f64>,
    /// 90th percentile of the latency.
    pub p90_us: Option<f64>,
    /// 99th percentile of the latency.
    pub p99_us: Option<f64>,
    /// CPU time of the disk's threads for each request. `None`: the threads serve other disks, too.
    pub cpu_us: Option<f64>,
    /// Number of requests that failed.
    pub errors: u64,
}

/// A round without the change, and the next round, with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// The round without the change.
    pub without: Round,
    /// The round with the change.
    pub with: Round,
}

/// A measure of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Requests per second.
    Iops,
    /// Median of the latency.
    P50,
    /// 99th percentile of the latency.
    P99,
    /// CPU time for each request.
    Cpu,
}

impl Measure {
    /// All measures, the main one first.
    pub const ALL: [Measure; 4] = [Measure::Iops, Measure::P50, Measure::P99, Measure::Cpu];

    /// Returns the name of the measure.
    pub fn name(self) -> &'static str {
        match self {
            Measure::Iops => "IOPS",
            Measure::P50 => "p50",
            Measure::P99 => "p99",
            Measure::Cpu => "CPU per request",
        }
    }

    fn of(self, round: &Round) -> Option<f64> {
        match self {
            Measure::Iops => Some(round.iops),
            Measure::P50 => round.p50_us,
            Measure::P99 => round.p99_us,
            Measure::Cpu => round.cpu_us,
        }
    }

    /// Returns an effect as one of which more is better: its value and the pessimistic and the
    /// optimistic end of its interval.
    fn improvement(self, effect: &Effect) -> [f64; 3] {
        match self {
            Measure::Iops => [effect.ratio, effect.low, effect.high],
            _ => [1.0 / effect.ratio, 1.0 / effect.high, 1.0 / effect.low],
        }
    }
}

/// Returns the effects on all measures that are known in at least one pair.
pub fn effects(pairs: &[Pair]) -> Vec<(Measure, Effect)> {
    let of = |measure: Measure| {
        let ratio = |pair: &Pair| Some(measure.of(&pair.with)? / measure.of(&pair.without)?);
        let ratios: Vec<f64> = pairs.iter().filter_map(ratio).collect();
        Some((measure, effect(&ratios)?))
    };
    Measure::ALL.into_iter().filter_map(of).collect()
}

/// The judgement about a change that was tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Judgement {
    /// At least one measure is better by 5% or more, and no rate or latency is worse. The value is
    /// the largest improvement, as a factor.
    Better(f64),
    /// A rate or a latency is worse by 5% or more.
    Worse,
    /// The rounds show no difference.
    NoDifference,
}

/// Judges a change. A measure is better or worse if its whole interval is.
pub fn judge(effects: &[(Measure, Effect)]) -> Judgement {
    let all = effects
        .iter()
        .map(|(measure, effect)| (*measure, measure.improvement(effect)));
    // (CPU time is the price of a change, and alone makes it no worse.)
    let is_worse = |(measure, [value, _, high]): (Measure, [f64; 3])| {
        measure != Measure::Cpu && high < 1.0 && value <= 1.0 / GAIN
    };
    if all.clone().any(is_worse) {
        return Judgement::Worse;
    }
    let better = all.filter(|(_, [value, low, _])| *low > 1.0 && *value >= GAIN);
    let best = better.map(|(_, [value, ..])| value).max_by(f64::total_cmp);
    best.map_or(Judgement::NoDifference, Judgement::Better)
}

/// Returns why the trial of a change must end after the round `with`: requests fail that did not
/// fail without it, or the latency is twice as bad. `without` has the rounds without the change.
///
/// The percentile is the highest that is known in both: the 99th, the 90th or the median.
pub fn worse(without: &[Round], with: &Round) -> Option<String> {
    let failed = without.iter().map(|round| round.errors).max().unwrap_or(0);
    if with.errors > failed {
        return Some(format!("{} requests failed", with.errors));
    }
    type Percentile = (&'static str, fn(&Round) -> Option<f64>);
    let percentiles: [Percentile; 3] = [
        ("p99", |round| round.p99_us),
        ("p90", |round| round.p90_us),
        ("p50", |round| round.p50_us),
    ];
    let known = |(name, of): Percentile| {
        let before = median(without.iter().filter_map(of).collect())?;
        Some((name, before, of(with)?))
    };
    let (name, before, now) = percentiles.into_iter().find_map(known)?;
    (now > TWICE * before).then(|| format!("{name} rose from {before:.0} us to {now:.0} us"))
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(iops: f64, us: f64) -> Round {
        Round {
            iops,
            p50_us: Some(us),
            p90_us: Some(us * 2.0),
            p99_us: Some(us * 4.0),
            cpu_us: Some(10.0),
            errors: 0,
        }
    }

    fn pairs(with: impl Fn(usize) -> Round) -> Vec<Pair> {
        let pair = |n| Pair {
            without: round(1000.0 + n as f64, 100.0),
            with: with(n),
        };
        (0..6).map(pair).collect()
    }

    #[test]
    fn a_gain_in_each_pair_is_better() {
        let all = effects(&pairs(|n| round(2000.0 + n as f64, 50.0)));
        let names: Vec<_> = all.iter().map(|(measure, _)| measure.name()).collect();
        assert_eq!(names, ["IOPS", "p50", "p99", "CPU per request"]);
        assert_eq!(judge(&all), Judgement::Better(2.0));
    }

    #[test]
    fn a_gain_in_some_pairs_is_no_difference() {
        let mixed = pairs(|n| round(if n == 0 { 900.0 } else { 2000.0 }, 100.0));
        assert_eq!(judge(&effects(&mixed)), Judgement::NoDifference);
        let small = pairs(|_| round(1030.0, 100.0));
        assert_eq!(judge(&effects(&small)), Judgement::NoDifference);
        assert_eq!(judge(&[]), Judgement::NoDifference);
    }

    #[test]
    fn a_rate_for_a_worse_latency_is_worse() {
        let traded = pairs(|_| round(2000.0, 150.0));
        assert_eq!(judge(&effects(&traded)), Judgement::Worse);
        let dear = pairs(|_| Round {
            cpu_us: Some(90.0),
            ..round(2000.0, 50.0)
        });
        assert!(matches!(judge(&effects(&dear)), Judgement::Better(_)));
    }

    #[test]
    fn unknown_percentiles_have_no_effect() {
        let few = pairs(|_| Round {
            p99_us: None,
            cpu_us: None,
            ..round(2000.0, 50.0)
        });
        let all = effects(&few);
        let names: Vec<_> = all.iter().map(|(measure, _)| measure.name()).collect();
        assert_eq!(names, ["IOPS", "p50"]);
    }

    #[test]
    fn failed_requests_and_doubled_latency_end_a_trial() {
        let without = [round(1000.0, 100.0), round(1000.0, 110.0)];
        assert_eq!(worse(&without, &round(1000.0, 199.0)), None);
        let slow = worse(&without, &round(1000.0, 201.0)).unwrap();
        assert_eq!(slow, "p99 rose from 400 us to 804 us");
        let failed = Round {
            errors: 2,
            ..round(1000.0, 100.0)
        };
        assert_eq!(worse(&without, &failed).unwrap(), "2 requests failed");
        // The same requests fail without the change.
        assert_eq!(worse(&[failed], &failed), None);
        let few = |us| Round {
            p99_us: None,
            ..round(100.0, us)
        };
        assert!(worse(&without, &few(201.0)).unwrap().starts_with("p90"));
        assert_eq!(worse(&[], &round(1.0, 1e9)), None);
    }
}
