//! The main measure along a numeric axis, such as the number of threads: a line for each
//! combination of the other settings, and the knee of each line.

use fathom_run::Better;
use fathom_units::parse_size;
use serde::Serialize;

use super::cell::Column;
use super::points::Settings;
use super::table::{Figure, Point};

/// Minimum number of values on the axis; with fewer, bars show as much.
const LEAST_VALUES: usize = 3;
/// Gain per step, relative to the first value's, below which the curve has bent.
const LITTLE: f64 = 0.5;

/// A point on a line: its place on the axis, and its figure.
pub(super) struct Dot<'a> {
    pub(super) x: u64,
    pub(super) point: &'a Point,
    pub(super) figure: &'a Figure,
}

pub(super) struct Line<'a> {
    /// All settings except the axis.
    pub(super) settings: Settings,
    /// In the order of the axis.
    pub(super) dots: Vec<Dot<'a>>,
}

/// The knee of a curve: the last value of the axis before the gain per unit falls below half of the
/// first value's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Knee {
    /// Name of the parameter along which the curve runs.
    pub axis: String,
    /// The settings of the other axes, which identify the curve.
    pub settings: Settings,
    /// The value of the axis at the knee.
    pub at: String,
    /// Value of the axis that follows `at`.
    pub beyond: String,
    /// The knee is the curve's first value, and that is above one: the bend may lie before it.
    pub or_before: bool,
    /// The gain per unit from `at` to `beyond`, relative to the first value's.
    pub gain: f64,
    /// The suspected limiter at `beyond`, in a line.
    pub verdict: Option<String>,
}

/// Returns the numeric axis with the most values, and its values, if it has enough of them.
pub(super) fn axis<'a>(axes: &'a [String], points: &[Point]) -> Option<(&'a str, Vec<u64>)> {
    let axes = axes.iter();
    let axes = axes.filter_map(|axis| Some((axis.as_str(), values(points, axis)?)));
    // The first of several equals.
    axes.rev().max_by_key(|(_, values)| values.len())
}

/// Returns the axis's values in order, without duplicates. Returns `None` if a value is not a
/// number, or if there are too few values.
fn values(points: &[Point], axis: &str) -> Option<Vec<u64>> {
    let values = points.iter().map(|point| number(point, axis));
    let mut values = values.collect::<Option<Vec<u64>>>()?;
    values.sort_unstable();
    values.dedup();
    (values.len() >= LEAST_VALUES).then_some(values)
}

fn number(point: &Point, axis: &str) -> Option<u64> {
    parse_size(point.settings.get(axis)?).ok()
}

/// Returns the lines, in the order of the points.
pub(super) fn lines<'a>(points: &'a [Point], main: &Column, axis: &str) -> Vec<Line<'a>> {
    let mut lines: Vec<Line> = Vec::new();
    for point in points {
        let (Some(x), Some(figure)) = (number(point, axis), point.measures.get(&main.name)) else {
            continue;
        };
        let mut settings = point.settings.clone();
        settings.remove(axis);
        let dot = Dot { x, point, figure };
        match lines.iter_mut().find(|line| line.settings == settings) {
            Some(line) => line.dots.push(dot),
            None => lines.push(Line {
                settings,
                dots: vec![dot],
            }),
        }
    }
    for line in &mut lines {
        line.dots.sort_by_key(|dot| dot.x);
    }
    lines
}

impl Knee {
    /// Returns the knees of all curves that have one.
    pub(super) fn all(axes: &[String], points: &[Point], main: Option<&Column>) -> Vec<Knee> {
        let main = main.filter(|main| main.better == Better::Higher);
        let (Some(main), Some((axis, _))) = (main, axis(axes, points)) else {
            return Vec::new();
        };
        let lines = lines(points, main, axis);
        lines.iter().filter_map(|line| line.knee(axis)).collect()
    }
}

impl Line<'_> {
    fn knee(&self, axis: &str) -> Option<Knee> {
        let places = self
            .dots
            .iter()
            .map(|dot| (dot.x as f64, dot.figure.median));
        let (at, gain) = bend(&places.collect::<Vec<_>>())?;
        let value = |dot: &Dot| dot.point.settings.get(axis).cloned();
        let beyond = &self.dots[at + 1];
        Some(Knee {
            axis: axis.to_owned(),
            settings: self.settings.clone(),
            at: value(&self.dots[at])?,
            beyond: value(beyond)?,
            or_before: at == 0 && self.dots[at].x > 1,
            gain,
            verdict: beyond.point.verdict.clone(),
        })
    }
}

/// Returns the index of the last place before the first small gain, and that gain.
fn bend(places: &[(f64, f64)]) -> Option<(usize, f64)> {
    let (x, y) = places.first()?;
    let first = y / x;
    if !first.is_finite() || first <= 0.0 {
        return None;
    }
    let gain = |pair: &[(f64, f64)]| (pair[1].1 - pair[0].1) / (pair[1].0 - pair[0].0) / first;
    let mut gains = places.windows(2).map(gain).enumerate();
    gains.find(|(_, gain)| *gain < LITTLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_bends_where_one_more_brings_less_than_half() {
        // Two CPUs: the third and fourth thread add nothing.
        let two = [(1.0, 0.3), (2.0, 0.58), (4.0, 0.6), (8.0, 0.59)];
        let (at, gain) = bend(&two).unwrap();
        assert_eq!(at, 1);
        assert!((gain - 0.02 / 2.0 / 0.3).abs() < 1e-9, "{gain}");
        // Each unit adds as much as the first, or half of it.
        assert_eq!(bend(&[(1.0, 5.0), (2.0, 10.0), (8.0, 40.0)]), None);
        assert_eq!(bend(&[(2.0, 4.0), (4.0, 6.0)]), None);
        assert_eq!(bend(&[(2.0, 4.0), (4.0, 5.9)]).unwrap().0, 0);
        // The curve falls from the start.
        assert_eq!(bend(&[(10.0, 2.0), (20.0, 1.0)]), Some((0, -0.5)));
    }

    #[test]
    fn what_does_not_begin_does_not_bend() {
        for places in [
            &[][..],
            &[(1.0, 1.0)],
            &[(0.0, 1.0), (1.0, 1.0)],
            &[(1.0, 0.0), (2.0, 0.0)],
            &[(1.0, f64::NAN), (2.0, 1.0)],
        ] {
            assert_eq!(bend(places), None, "{places:?}");
        }
    }
}
