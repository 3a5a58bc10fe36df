//! Distributions of delays.

use crate::random::Random;
use crate::values::{ticks, time};
use std::sync::Arc;
use std::time::Duration;

/// A distribution of times, in ticks of the clock.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Spread {
    Fixed(u64),
    /// Uniform distribution, both ends included.
    Even(u64, u64),
    /// Mean and standard deviation; negative values become 0.
    Normal(f64, f64),
    Recorded(Arc<Buckets>),
}

/// A recorded histogram: ranges of ticks, each with the cumulative number of samples up to its end.
#[derive(Debug, PartialEq)]
pub(super) struct Buckets(pub(super) Vec<(u64, u64, u64)>);

impl Spread {
    /// Parses `10ms`, `5ms..20ms` or `10ms+-2ms`.
    pub(super) fn parse(text: &str) -> Result<Spread, String> {
        if let Some((from, to)) = text.split_once("..") {
            let (from, to) = (time(from)?, time(to)?);
            if from > to {
                return Err(format!("'{text}': ends before it begins"));
            }
            return Ok(Spread::Even(ticks(from), ticks(to)));
        }
        if let Some((mean, deviation)) = text.split_once("+-") {
            let (mean, deviation) = (ticks(time(mean)?), ticks(time(deviation)?));
            return Ok(Spread::Normal(mean as f64, deviation as f64));
        }
        Ok(Spread::Fixed(ticks(time(text)?)))
    }

    pub(super) fn is_zero(&self) -> bool {
        *self == Spread::Fixed(0)
    }

    #[inline]
    pub(super) fn draw(&self, random: &mut Random) -> u64 {
        match self {
            Spread::Fixed(ticks) => *ticks,
            Spread::Even(from, to) => from + (random.unit() * (to - from + 1) as f64) as u64,
            Spread::Normal(mean, deviation) => (mean + deviation * random.normal()) as u64,
            Spread::Recorded(buckets) => buckets.draw(random),
        }
    }

    /// Draws a time for a rare event, without a persistent generator.
    pub(super) fn draw_time(&self, seed: u64) -> Duration {
        let clock = fathom_core::Clock::get();
        let ticks = match self {
            Spread::Fixed(ticks) => *ticks,
            _ => self.draw(&mut Random::new(seed ^ clock.now())),
        };
        clock.duration(ticks)
    }
}

impl Buckets {
    fn draw(&self, random: &mut Random) -> u64 {
        let Some((_, _, total)) = self.0.last() else {
            return 0;
        };
        let rank = random.next() % total;
        let index = self.0.partition_point(|(_, _, up_to)| *up_to <= rank);
        let (from, to, _) = self.0[index];
        from + (random.unit() * (to - from) as f64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_vary_as_they_are_told_to() {
        let ms = |n| ticks(Duration::from_millis(n));
        assert_eq!(Spread::parse("10ms"), Ok(Spread::Fixed(ms(10))));
        assert_eq!(Spread::parse("5ms..20ms"), Ok(Spread::Even(ms(5), ms(20))));
        let normal = Spread::Normal(ms(10) as f64, ms(2) as f64);
        assert_eq!(Spread::parse("10ms+-2ms"), Ok(normal));
        for bad in ["", "10", "20ms..5ms", "..", "5ms..", "+-", "1ms+-", "-1ms"] {
            assert!(Spread::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_drawn_has_the_mean_and_the_spread_that_was_asked_for() {
        let mut random = Random::new(1);
        let mut draw = |spread: &Spread| -> Vec<f64> {
            (0..100_000)
                .map(|_| spread.draw(&mut random) as f64)
                .collect()
        };
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let even = draw(&Spread::Even(1000, 3000));
        assert!((mean(&even) / 2000.0 - 1.0).abs() < 0.01);
        assert!(even.iter().all(|v| (1000.0..=3000.0).contains(v)));
        assert!(even.iter().any(|v| *v < 1020.0) && even.iter().any(|v| *v > 2980.0));
        let normal = draw(&Spread::Normal(10_000.0, 2_000.0));
        let deviations: Vec<_> = normal.iter().map(|v| (v - 10_000.0).powi(2)).collect();
        assert!((mean(&normal) / 10_000.0 - 1.0).abs() < 0.01);
        assert!((mean(&deviations).sqrt() / 2_000.0 - 1.0).abs() < 0.02);
        let recorded = Buckets(vec![(100, 200, 1), (500, 501, 4)]);
        let recorded = draw(&Spread::Recorded(Arc::new(recorded)));
        let late = recorded.iter().filter(|v| **v == 500.0).count() as f64;
        assert!((late / 75_000.0 - 1.0).abs() < 0.02);
        assert!(
            recorded
                .iter()
                .all(|v| *v == 500.0 || (100.0..200.0).contains(v))
        );
    }
}
