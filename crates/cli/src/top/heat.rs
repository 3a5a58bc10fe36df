//! A heat map of latencies: number of requests by latency and interval.

use super::look::LEVELS;
use super::model::Tick;
use fathom_metrics::{BUCKETS_PER_DOUBLING, bucket_ns};
use std::collections::BTreeMap;

/// Minimum time span of the map in seconds.
const SPAN: f64 = 120.0;
/// Minimum height of the map in buckets: two doublings, so that small differences look small.
const LEAST: u32 = 2 * BUCKETS_PER_DOUBLING;

/// The rows go from the longest latency to the shortest, the columns from the oldest to now.
#[derive(Debug, PartialEq)]
pub struct HeatMap {
    /// Shade of each cell: 0 for no requests, up to [`LEVELS`].
    pub rows: Vec<Vec<u8>>,
    /// Lower bound of each row in microseconds.
    pub from_us: Vec<f64>,
    /// Duration of a column in seconds.
    pub column_seconds: f64,
}

impl HeatMap {
    /// Builds the map of these intervals, or returns `None` without requests.
    pub fn of<'a>(
        ticks: impl DoubleEndedIterator<Item = &'a Tick> + Clone,
        columns: usize,
        rows: usize,
    ) -> Option<HeatMap> {
        let last = ticks.clone().next_back()?;
        let seconds = last.seconds.max(0.1);
        // A column has several intervals if [`SPAN`] does not fit; numbers keep the groups stable.
        let together = (SPAN / seconds / columns.max(1) as f64).ceil().max(1.0) as u64;
        let newest = last.number / together;
        let column_of = |tick: &Tick| {
            let age = newest.saturating_sub(tick.number / together) as usize;
            columns.checked_sub(1 + age)
        };
        let mut cells = BTreeMap::<(u32, usize), u64>::new();
        for tick in ticks {
            let Some(column) = column_of(tick) else {
                continue;
            };
            for (bucket, n) in &tick.histogram {
                *cells.entry((*bucket, column)).or_default() += n;
            }
        }
        let (lowest, highest) = (lowest(&cells)?, cells.keys().next_back()?.0);
        let rows = u32::try_from(rows.max(1)).unwrap_or(1);
        let span = (highest - lowest + 1).max(LEAST);
        let each = span.div_ceil(rows);
        // Half of the spare rows is below the data.
        let spare = (rows * each).saturating_sub(highest - lowest + 1);
        let base = lowest.saturating_sub(spare / 2);
        let mut counts = vec![vec![0; columns]; rows as usize];
        for ((bucket, column), n) in cells {
            let row = (bucket.saturating_sub(base) / each).min(rows - 1);
            counts[(rows - 1 - row) as usize][column] += n;
        }
        let most = counts.iter().flatten().copied().max().unwrap_or(0);
        let shade = |row: Vec<u64>| row.into_iter().map(|n| level(n, most)).collect();
        Some(HeatMap {
            rows: counts.into_iter().map(shade).collect(),
            from_us: (0..rows)
                .rev()
                .map(|row| bucket_ns(base + row * each) / 1e3)
                .collect(),
            column_seconds: together as f64 * seconds,
        })
    }
}

/// Returns the lowest bucket of the map.
///
/// The fastest 2% of the requests, such as flushes of clean disks, may be below it and appear in
/// the lowest row. This leaves room for the others. Slow requests are never left out.
fn lowest(cells: &BTreeMap<(u32, usize), u64>) -> Option<u32> {
    let few = cells.values().sum::<u64>() / 50;
    let mut below = 0;
    let first = cells.iter().find(|(_, n)| {
        below += **n;
        below > few
    });
    first.map(|((bucket, _), _)| *bucket)
}

/// Returns the shade on a logarithmic scale, so that one request is visible next to a million.
fn level(n: u64, most: u64) -> u8 {
    match n {
        0 => 0,
        _ if most <= 1 => LEVELS,
        n => {
            let share = (n as f64).ln() / (most as f64).ln();
            1 + (share * f64::from(LEVELS - 1)).round() as u8
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tick(number: u64, histogram: &[(u32, u64)]) -> Tick {
        Tick {
            number,
            seconds: 1.0,
            histogram: histogram.to_vec(),
        }
    }

    #[test]
    fn time_goes_to_the_right_and_latency_upward() {
        let ticks = [tick(1, &[(40, 1000)]), tick(2, &[(40, 1000), (59, 1)])];
        let map = HeatMap::of(ticks.iter(), 200, 10).unwrap();
        assert_eq!((map.rows.len(), map.column_seconds), (10, 1.0));
        let at = |row: usize, column: usize| map.rows[row][column];
        let used: Vec<_> = (0..10)
            .flat_map(|row| (0..200).map(move |column| (row, column)))
            .filter(|(row, column)| at(*row, *column) > 0)
            .collect();
        assert_eq!(used, [(0, 199), (9, 198), (9, 199)]);
        assert_eq!((at(0, 199), at(9, 199)), (1, LEVELS));
        assert!(map.from_us.is_sorted_by(|a, b| a > b));
        // The lower bound is 2^10 ns.
        assert!((map.from_us[9] - 1.024).abs() < 0.001, "{:?}", map.from_us);
    }

    #[test]
    fn a_few_that_take_no_time_do_not_take_the_room_of_others() {
        let ticks = [tick(1, &[(3, 1), (100, 500), (150, 1)])];
        let map = HeatMap::of(ticks.iter(), 10, 51).unwrap();
        assert_eq!((map.rows[0][9], map.rows[50][9]), (1, LEVELS));
        let half = [tick(1, &[(3, 100), (100, 100)])];
        let map = HeatMap::of(half.iter(), 10, 98).unwrap();
        assert_eq!((map.rows[0][9], map.rows[97][9]), (LEVELS, LEVELS));
    }

    #[test]
    fn two_minutes_fit_in_any_width() {
        let ticks: Vec<_> = (100..340).map(|n| tick(n, &[(80, 5)])).collect();
        for columns in [1, 7, 60, 300] {
            let map = HeatMap::of(ticks.iter(), columns, 6).unwrap();
            let span = columns as f64 * map.column_seconds;
            assert!(span >= SPAN, "{columns}: {span}");
            assert!(map.rows.iter().all(|row| row.len() == columns));
            assert!(map.rows.iter().any(|row| row[columns - 1] > 0));
        }
        assert_eq!(HeatMap::of([].iter(), 10, 10), None);
        assert_eq!(HeatMap::of([tick(1, &[])].iter(), 10, 10), None);
        let far = [tick(1, &[(0, 1), (400, 1)])];
        assert!(HeatMap::of(far.iter(), 1, 0).is_some());
        assert_eq!(HeatMap::of(far.iter(), 0, 0), None);
    }
}
