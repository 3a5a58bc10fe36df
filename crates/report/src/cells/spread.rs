//! The distribution of the main measure over many rounds; each round is one sample.

use super::cell::Column;
use super::statistics::sorted;
use super::table::{Figure, Table};
use super::words::Scale;

/// Minimum number of rounds; with fewer, an interval says as much.
const LEAST: usize = 10;

/// A point's index among all points, and its texts for [`HEADINGS`].
pub(super) type Spread = (usize, [String; HEADINGS.len()]);

pub(super) const HEADINGS: [&str; 8] = ["rounds", "mean", "sd", "min", "p50", "p90", "p99", "max"];
pub(super) const EXPLAINED: &str = "sd is the standard deviation. A percentile is the least round that this share does not exceed.";

/// Returns the main measure's column, and the points that have enough rounds.
pub(super) fn of(table: &Table) -> Option<(&Column, Vec<Spread>)> {
    let main = table.main()?;
    let points = table.points.iter().enumerate();
    let figures =
        points.filter_map(|(place, point)| Some((place, point.measures.get(&main.name)?)));
    let figures: Vec<(usize, &Figure)> = figures
        .filter(|(_, figure)| figure.rounds.len() >= LEAST)
        .collect();
    if figures.is_empty() {
        return None;
    }
    let scale = Scale::of(main.unit, figures.iter().map(|(_, figure)| figure.median));
    let rows = figures
        .into_iter()
        .map(|(place, figure)| (place, row(figure, &scale)));
    Some((main, rows.collect()))
}

fn row(figure: &Figure, scale: &Scale) -> [String; 8] {
    let values = sorted(figure.rounds.iter().map(|(_, value)| *value));
    let n = values.len() as f64;
    let mean = values.iter().map(|value| value / n).sum::<f64>();
    let squares = values.iter().map(|value| (value - mean).powi(2));
    let sd = (squares.sum::<f64>() / (n - 1.0).max(1.0)).sqrt();
    let [min, p50, p90, p99, max] = [0.0, 0.5, 0.9, 0.99, 1.0].map(|share| {
        let rank = ((share * n).ceil() as usize).clamp(1, values.len().max(1));
        values.get(rank - 1).copied().unwrap_or_default()
    });
    let written = [mean, sd, min, p50, p90, p99, max].map(|value| scale.write(value));
    let [mean, sd, min, p50, p90, p99, max] = written;
    [values.len().to_string(), mean, sd, min, p50, p90, p99, max]
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::Unit;

    #[test]
    fn a_hundred_rounds_have_their_percentiles() {
        let figure = Figure {
            rounds: (1..=100).map(|round| (round, f64::from(round))).collect(),
            median: 50.5,
            interval: None,
            ratio: None,
        };
        let scale = Scale::of(Unit::Count, [100.5].into_iter());
        let row = row(&figure, &scale);
        assert_eq!(
            row,
            [
                "100", "50.5", "29.0", "1.0", "50.0", "90.0", "99.0", "100.0"
            ]
        );
    }
}
