//! Whether a run has enough rounds: whether the intervals of its main measure are narrow enough.
//!
//! The width decides, and never a verdict. A run that ended as soon as it had a verdict would have
//! one by chance, sooner or later.

use super::statistics::{ENOUGH, Interval};
use super::table::{Figure, Point, Table};
use super::verdict::{Ratio, Verdict};
use super::words;

/// Whether more rounds are needed, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Confidence {
    /// All intervals are narrow enough, and there are enough rounds for verdicts.
    Enough(String),
    /// An interval is too wide, or there are not enough rounds for a verdict.
    NotYet(String),
    /// No interval exists that more rounds would make narrower.
    Never(String),
}

/// How a point stands in the way.
struct Obstacle {
    /// Number of missing rounds.
    more: u32,
    /// Width of the interval, relative to its figure.
    width: f64,
}

impl Table {
    /// Returns whether the intervals of the main measure are at most `width` wide, relative to what
    /// they are intervals of: the ratios to the base, or the figures themselves if there are no
    /// ratios.
    pub fn confidence(&self, width: f64) -> Confidence {
        let Some(main) = self.main() else {
            return Confidence::Never("no measure of this run can be better or worse".into());
        };
        let figures = { self.points.iter() }
            .filter_map(|point| Some((point, point.measures.get(&main.name)?)));
        let figures: Vec<(&Point, &Figure)> = figures.collect();
        let ratios = figures.iter();
        let ratios = ratios.filter_map(|(point, figure)| Some((*point, figure.ratio.as_ref()?)));
        let mut all: Vec<(&Point, Obstacle)> = ratios
            .map(|(point, ratio)| (point, of_ratio(ratio)))
            .collect();
        if all.is_empty() {
            let figures = figures.into_iter();
            all.extend(figures.map(|(point, figure)| (point, of_figure(figure))));
        }
        let size = |of: &Obstacle| (of.more, of.width);
        let worst = all.iter().max_by(|(_, a), (_, b)| {
            let ((a, a_width), (b, b_width)) = (size(a), size(b));
            a.cmp(&b).then(a_width.total_cmp(&b_width))
        });
        let Some((point, worst)) = worst else {
            return Confidence::Never(format!("no cell has measured {}", main.name));
        };
        let place = words::label(&point.settings);
        if worst.more > 0 {
            return Confidence::NotYet(format!("{place}: not enough rounds: {} more", worst.more));
        }
        match worst.width <= width {
            true => Confidence::Enough(format!(
                "all intervals of {} are at most {} wide",
                main.name,
                words::width(width)
            )),
            false => Confidence::NotYet(format!(
                "the interval of {} for {place} is {} wide, and {} is wanted",
                main.name,
                words::width(worst.width),
                words::width(width)
            )),
        }
    }
}

fn of_ratio(ratio: &Ratio) -> Obstacle {
    Obstacle {
        more: match ratio.verdict {
            Verdict::NotEnoughRounds { more } => more,
            _ => 0,
        },
        width: relative(ratio.interval, ratio.median),
    }
}

fn of_figure(figure: &Figure) -> Obstacle {
    Obstacle {
        more: ENOUGH.saturating_sub(figure.rounds.len()) as u32,
        width: relative(figure.interval, figure.median),
    }
}

fn relative(interval: Option<Interval>, median: f64) -> f64 {
    let width = interval.map(|(low, high)| (high - low) / median.abs());
    width
        .filter(|width| width.is_finite())
        .unwrap_or(f64::INFINITY)
}
