//! Ranks the settings of an experiment by their effects, if each of its points differs from the
//! base in exactly one setting.

use std::cmp::Ordering;

use fathom_run::{Better, Unit};
use serde::Serialize;

use super::cell::Column;
use super::table::Point;
use super::verdict::Ratio;

/// Suffix of the measures of the 99th percentile of latency. Rankings exist for the main measure,
/// for these, and for the CPU time of a request.
const P99: &str = "latency.p99";
/// CPU time on the whole host. If it was not measured, the first measure in that unit is ranked.
const CPU: &str = "cpu.host";

/// The effects of settings on a measure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ranking {
    /// Name of the measure.
    pub measure: String,
    /// Direction in which a change of the measure is an improvement.
    pub better: Better,
    /// Greatest effect first; effects that are not shown come last.
    pub effects: Vec<Effect>,
}

/// The effect of one setting.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Effect {
    /// The parameter.
    pub setting: String,
    /// Value of the setting in the compared point.
    pub value: String,
    /// The setting's value in the base.
    pub base: String,
    /// Ratio to the base.
    pub ratio: Ratio,
}

impl Ranking {
    /// Ranks the points of a run, whose first point is the base. Returns no rankings if there are
    /// fewer than two other points, if one of them differs from the base in more than one setting,
    /// or if no measure can be compared.
    pub(super) fn all(points: &[Point], columns: &[Column], main: Option<&Column>) -> Vec<Ranking> {
        let [base, others @ ..] = points else {
            return Vec::new();
        };
        if others.len() < 2 {
            return Vec::new();
        }
        let differences = others.iter().map(|point| difference(base, point));
        let Some(differences) = differences.collect::<Option<Vec<_>>>() else {
            return Vec::new();
        };
        let measures = measures(columns, main).into_iter();
        let rankings = measures.map(|column| {
            let effects = others.iter().zip(&differences);
            let effects = effects.filter_map(|(point, (setting, base, value))| {
                let figure = point.measures.get(&column.name)?;
                Some(Effect {
                    setting: (*setting).to_owned(),
                    value: (*value).to_owned(),
                    base: (*base).to_owned(),
                    ratio: figure.ratio.clone()?,
                })
            });
            let mut effects: Vec<Effect> = effects.collect();
            effects.sort_by(by_effect);
            Ranking {
                measure: column.name.clone(),
                better: column.better,
                effects,
            }
        });
        rankings.filter(|one| !one.effects.is_empty()).collect()
    }
}

impl Effect {
    /// Returns the effect's label, such as `bus=ide (virtio-blk)`.
    pub(super) fn label(&self) -> String {
        format!("{}={} ({})", self.setting, self.value, self.base)
    }

    /// Returns the distance from no effect: a ratio of one half is as far as a ratio of two.
    fn size(&self) -> f64 {
        self.ratio.median.ln().abs()
    }
}

/// Returns the setting in which a point differs from the base, its value in the base, and its value
/// in the point. Returns `None` unless exactly one setting differs.
fn difference<'a>(base: &'a Point, point: &'a Point) -> Option<(&'a str, &'a str, &'a str)> {
    if base.settings.len() != point.settings.len() {
        return None;
    }
    let mut pairs = base.settings.iter().filter_map(|(name, value)| {
        let other = point.settings.get(name);
        (other != Some(value)).then_some((name, value, other))
    });
    match (pairs.next(), pairs.next()) {
        (Some((name, value, Some(other))), None) => Some((name, value, other)),
        _ => None,
    }
}

fn measures<'a>(columns: &'a [Column], main: Option<&'a Column>) -> Vec<&'a Column> {
    let is_p99 = |name: &str| {
        name.strip_suffix(P99)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let p99 = columns.iter().filter(|column| is_p99(&column.name));
    let mut costs = columns
        .iter()
        .filter(|column| column.unit == Unit::CpuMicrosecondsPerRequest);
    let whole = columns.iter().find(|column| column.name == CPU);
    let all = main
        .into_iter()
        .chain(p99)
        .chain(whole.or_else(|| costs.next()));
    let mut measures: Vec<&Column> = Vec::new();
    for column in all {
        if measures.iter().all(|known| known.name != column.name) {
            measures.push(column);
        }
    }
    measures
}

fn by_effect(a: &Effect, b: &Effect) -> Ordering {
    let is_shown = |effect: &Effect| effect.ratio.verdict.is_difference();
    let by_verdict = is_shown(b).cmp(&is_shown(a));
    by_verdict.then_with(|| b.size().total_cmp(&a.size()))
}

#[cfg(test)]
mod tests {
    use super::super::table::Figure;
    use super::super::verdict::Verdict;
    use super::super::words;
    use super::*;
    use std::collections::BTreeMap;

    const NONE: Verdict = Verdict::NoDifferenceShown;

    fn point(settings: &[(&str, &str)], ratio: Option<(f64, Verdict)>) -> Point {
        let owned = settings.iter();
        let settings = owned.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let ratio = ratio.map(|(median, verdict)| Ratio::told(median, verdict));
        let figure = Figure {
            rounds: vec![(1, 1.0)],
            median: 1.0,
            interval: None,
            ratio,
        };
        Point {
            settings: settings.collect(),
            planned: 1,
            done: 1,
            measures: ["iops", "read.latency.p99", "cpu.host", "cpu.vcpu", "x.p99"]
                .map(|name| (name.to_owned(), figure.clone()))
                .into(),
            ..Point::default()
        }
    }

    fn columns() -> Vec<Column> {
        let column = |name: &str, unit, better| Column {
            name: name.to_owned(),
            unit,
            better,
        };
        let cpu = Unit::CpuMicrosecondsPerRequest;
        vec![
            column("iops", Unit::PerSecond, Better::Higher),
            column("read.latency.p99", Unit::Nanoseconds, Better::Lower),
            column("x.p99", Unit::Nanoseconds, Better::Lower),
            column("cpu.vcpu", cpu, Better::Lower),
            column("cpu.host", cpu, Better::Lower),
        ]
    }

    fn ranked(points: &[Point]) -> Vec<Ranking> {
        let columns = columns();
        Ranking::all(points, &columns, columns.first())
    }

    const BASE: [(&str, &str); 2] = [("bus", "virtio"), ("cache", "none")];

    #[test]
    fn the_greatest_effect_is_first_and_unshown_ones_last() {
        let other = |bus, cache, ratio| point(&[("bus", bus), ("cache", cache)], Some(ratio));
        let rankings = ranked(&[
            point(&BASE, None),
            other("virtio", "unsafe", (9.0, NONE)),
            other("virtio", "directsync", (1.5, Verdict::Better)),
            other("ide", "none", (0.25, Verdict::Worse)),
            other("nvme", "none", (1.01, Verdict::NotEnoughRounds { more: 2 })),
        ]);
        let measures: Vec<_> = rankings.iter().map(|one| one.measure.as_str()).collect();
        assert_eq!(measures, ["iops", "read.latency.p99", "cpu.host"]);
        let told = |ranking: &Ranking| -> Vec<String> {
            let effects = ranking.effects.iter();
            effects
                .map(|one| format!("{} {}", one.label(), words::meaning(one.ratio.verdict)))
                .collect()
        };
        assert_eq!(
            told(&rankings[0]),
            [
                "bus=ide (virtio) worse",
                "cache=directsync (none) better",
                "cache=unsafe (none) no difference shown",
                "bus=nvme (virtio) not enough rounds: 2 more",
            ]
        );
    }

    #[test]
    fn points_that_differ_in_more_than_one_setting_are_not_ranked() {
        let both = point(
            &[("bus", "ide"), ("cache", "unsafe")],
            Some((0.5, Verdict::Worse)),
        );
        let one = point(
            &[("bus", "ide"), ("cache", "none")],
            Some((0.5, Verdict::Worse)),
        );
        assert_eq!(ranked(&[point(&BASE, None), one.clone(), both]), []);
        let other = point(&[("bus", "ide")], Some((0.5, Verdict::Worse)));
        assert_eq!(ranked(&[point(&BASE, None), one, other]), []);
        // A single effect has no rank.
        let alone = point(
            &[("bus", "ide"), ("cache", "none")],
            Some((0.5, Verdict::Worse)),
        );
        assert_eq!(ranked(&[point(&BASE, None), alone]), []);
        // Points that were not run have no rank.
        let not_run = Point {
            measures: BTreeMap::new(),
            ..point(&[("bus", "ide"), ("cache", "none")], None)
        };
        assert_eq!(ranked(&[point(&BASE, None), not_run.clone(), not_run]), []);
        assert_eq!(ranked(&[]), []);
    }

    #[test]
    fn half_is_as_far_as_twice_and_nothing_is_farthest() {
        let effect = |median| {
            point(
                &[("bus", "ide"), ("cache", "none")],
                Some((median, Verdict::Worse)),
            )
        };
        let noise = point(&[("bus", "virtio"), ("cache", "unsafe")], Some((1.0, NONE)));
        let size = |median| {
            let points = [point(&BASE, None), effect(median), noise.clone()];
            ranked(&points)[0].effects[0].size()
        };
        let sizes: Vec<f64> = [0.5, 2.0, 0.0].map(size).to_vec();
        assert!((sizes[0] - sizes[1]).abs() < 1e-12 && sizes[2].is_infinite());
    }
}
