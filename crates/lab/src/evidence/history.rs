//! Converts counters that only grow to figures over time.

use std::time::Duration;

use fathom_run::{Series, Unit};

/// Maximum number of points. Beyond it, every second point is dropped and the step doubles.
/// Counters lose nothing between two points, so the figures stay exact.
const MAX_POINTS: usize = 600;

/// Counters at one instant, relative to the window's begin.
#[derive(Clone, Copy, Debug, Default)]
pub struct Point {
    /// Seconds since the window's begin.
    pub at: f64,
    /// (running, all) ticks of the host's CPUs.
    pub host: Option<(f64, f64)>,
    /// Seconds that requests have spent in the device, added up.
    pub device: Option<f64>,
    /// CPU seconds of the I/O threads and workers.
    pub workers: Option<f64>,
}

pub struct History {
    step: f64,
    points: Vec<Point>,
}

impl History {
    /// Starts at the window's begin, where all existing counters are 0.
    pub fn new(step: Duration, begin: Point) -> History {
        History {
            step: step.as_secs_f64(),
            points: vec![begin],
        }
    }

    pub fn step(&self) -> Duration {
        Duration::from_secs_f64(self.step)
    }

    pub fn add(&mut self, point: Point) {
        self.points.push(point);
        if self.points.len() > MAX_POINTS {
            self.thin();
        }
    }

    /// Drops every second point and doubles the step.
    pub fn thin(&mut self) {
        let mut number = 0;
        self.points.retain(|_| {
            number += 1;
            number % 2 == 1
        });
        self.step *= 2.0;
    }

    /// Returns the series `host.busy`, in percent of all CPUs; `device.in_flight`, in requests; and
    /// `workers.busy`, of all workers together in percent of one CPU. Each covers the whole steps
    /// of the window. A counter that was not read has no series.
    pub fn series(&self) -> Vec<Series> {
        let steps = self.points.last().map_or(0.0, |last| last.at / self.step);
        // Points are sometimes late: the last one may be slightly before the end of its step.
        let steps = (steps + 0.01).floor() as usize;
        let rate = |at: &dyn Fn(&Point) -> Option<f64>| {
            self.growth(steps, at)
                .map(|grown| grown.iter().map(|growth| growth / self.step).collect())
        };
        let percent = |values: Vec<f64>| values.iter().map(|value| value * 100.0).collect();
        // Workers may start after the window's begin.
        let has_workers = self.points.iter().any(|point| point.workers.is_some());
        let workers = rate(&|point| point.workers.or(has_workers.then_some(0.0))).map(percent);
        let all = [
            ("host.busy", Unit::Percent, self.busy(steps)),
            ("device.in_flight", Unit::Count, rate(&|point| point.device)),
            ("workers.busy", Unit::Percent, workers),
        ];
        let of = |(name, unit, values): (&str, Unit, Option<Vec<f64>>)| {
            Some(Series {
                name: name.to_owned(),
                unit,
                first: self.step,
                step: self.step,
                values: values.filter(|values| !values.is_empty())?,
            })
        };
        all.into_iter().filter_map(of).collect()
    }

    fn busy(&self, steps: usize) -> Option<Vec<f64>> {
        let running = self.growth(steps, &|point| Some(point.host?.0))?;
        let all = self.growth(steps, &|point| Some(point.host?.1))?;
        let percent = |(running, all): (&f64, &f64)| match *all > 0.0 {
            true => (running / all * 100.0).min(100.0),
            false => 0.0,
        };
        Some(running.iter().zip(&all).map(percent).collect())
    }

    /// Returns the growth of a counter in each step. Between two points, the counter is
    /// interpolated linearly. Returns `None` if the counter is missing from a point.
    fn growth(&self, steps: usize, of: &dyn Fn(&Point) -> Option<f64>) -> Option<Vec<f64>> {
        let points: Vec<(f64, f64)> = self
            .points
            .iter()
            .map(|point| Some((point.at, of(point)?)))
            .collect::<Option<_>>()?;
        let at = |time: f64| {
            let after = points.partition_point(|point| point.0 < time);
            let (before, after) = (points.get(after.checked_sub(1)?)?, points.get(after));
            let Some(after) = after else {
                return Some(before.1);
            };
            let part = (time - before.0) / (after.0 - before.0);
            Some(before.1 + part * (after.1 - before.1))
        };
        let ends: Vec<f64> = (0..=steps)
            .map(|step| at(step as f64 * self.step).or(Some(points.first()?.1)))
            .collect::<Option<_>>()?;
        Some(ends.windows(2).map(|ends| ends[1] - ends[0]).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(at: f64, workers: f64) -> Point {
        Point {
            at,
            host: Some((at * 60.0, at * 200.0)),
            device: Some(at * 3.0),
            workers: Some(workers),
        }
    }

    fn history(points: &[(f64, f64)]) -> History {
        let mut history = History::new(Duration::from_millis(500), point(0.0, 0.0));
        for &(at, workers) in points {
            history.add(point(at, workers));
        }
        history
    }

    #[test]
    fn counters_become_rates_of_even_steps() {
        // The second point is half a step late, and the last step is not complete.
        let late = history(&[(0.5, 0.1), (1.25, 0.55), (1.5, 0.7), (1.7, 0.75)]);
        let series = late.series();
        let names: Vec<&str> = series.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["host.busy", "device.in_flight", "workers.busy"]);
        assert_eq!((series[1].first, series[1].step), (0.5, 0.5));
        let near = |values: &[f64], expected: &[f64]| {
            assert_eq!(values.len(), expected.len(), "{values:?}");
            let pairs = values.iter().zip(expected);
            assert!(
                pairs.clone().all(|(a, b)| (a - b).abs() < 1e-6),
                "{values:?}"
            );
        };
        near(&series[0].values, &[30.0, 30.0, 30.0]);
        near(&series[1].values, &[3.0, 3.0, 3.0]);
        near(&series[2].values, &[20.0, 60.0, 60.0]);
    }

    #[test]
    fn a_long_window_has_longer_steps_and_loses_nothing() {
        let mut long = history(&[]);
        let mut now = 0.0;
        while now < 1250.0 {
            now += long.step;
            long.add(point(now, 7.0));
        }
        assert_eq!(long.step(), Duration::from_secs(4));
        assert!(long.points.len() <= MAX_POINTS);
        let values = &long.series()[2].values;
        assert_eq!(values.len(), (now / 4.0) as usize);
        let sum: f64 = values.iter().sum();
        assert!((sum * 4.0 / 100.0 - 7.0).abs() < 1e-6, "{sum}");
    }

    #[test]
    fn missing_counter_has_no_series_and_workers_may_start_late() {
        let begin = Point {
            workers: None,
            ..Point::default()
        };
        let mut later = History::new(Duration::from_millis(500), begin);
        later.add(Point {
            device: None,
            ..point(0.5, 0.25)
        });
        let series = later.series();
        assert_eq!(series.len(), 1, "{series:?}");
        assert_eq!(
            (series[0].name.as_str(), series[0].values[0]),
            ("workers.busy", 50.0)
        );
        assert_eq!(self::history(&[]).series(), []);
    }
}
