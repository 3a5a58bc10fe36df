//! A straight line from one clock to another.

use fathom_run::Pair;

/// `y = y0 + (x - x0) * slope`; x in ticks, y in ns.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    x0: u64,
    y0: i64,
    slope: f64,
    residual: i64,
}

impl Line {
    /// Returns the line `y = x`.
    pub(crate) fn identity() -> Line {
        Line::through(0, 0, 1.0)
    }

    /// Returns the line through a point.
    pub(crate) fn through(x0: u64, y0: i64, slope: f64) -> Line {
        Line {
            x0,
            y0,
            slope,
            residual: 0,
        }
    }

    /// Returns the least-squares line through pairs of readings. Returns None for fewer than two
    /// pairs, or if time does not rise between them.
    pub(crate) fn fit(pairs: &[Pair]) -> Option<Line> {
        let first = pairs.first()?;
        let n = pairs.len() as f64;
        // Relative to the first pair, so that an f64 holds every difference exactly.
        let point = |pair: &Pair| {
            let x = pair.tsc.wrapping_sub(first.tsc) as i64 as f64;
            let y = pair.monotonic_ns.wrapping_sub(first.monotonic_ns) as i64 as f64;
            (x, y)
        };
        let (mx, my) = pairs
            .iter()
            .map(point)
            .fold((0.0, 0.0), |(a, b), (x, y)| (a + x / n, b + y / n));
        let (mut xx, mut xy) = (0.0, 0.0);
        for (x, y) in pairs.iter().map(point) {
            xx += (x - mx) * (x - mx);
            xy += (x - mx) * (y - my);
        }
        let slope = xy / xx;
        if !(slope.is_finite() && slope > 0.0) {
            return None;
        }
        let mut line = Line::through(
            first.tsc,
            first.monotonic_ns as i64 + (my - slope * mx).round() as i64,
            slope,
        );
        let off = |pair: &Pair| (line.y(pair.tsc) - pair.monotonic_ns as i64).abs();
        line.residual = pairs.iter().map(off).max().unwrap_or(0);
        Some(line)
    }

    /// Converts ticks to ns.
    #[inline]
    pub(crate) fn y(&self, x: u64) -> i64 {
        let x = x.wrapping_sub(self.x0) as i64 as f64;
        self.y0.wrapping_add((x * self.slope).round() as i64)
    }

    /// Converts ns to ticks.
    #[inline]
    pub(crate) fn x(&self, y: i64) -> u64 {
        let y = y.wrapping_sub(self.y0) as f64;
        self.x0.wrapping_add((y / self.slope).round() as i64 as u64)
    }

    /// Returns the inverse of a line from ns to ns.
    pub(crate) fn inverse(&self) -> Line {
        Line::through(self.y0 as u64, self.x0 as i64, 1.0 / self.slope)
    }

    /// Returns the ns per tick.
    pub(crate) fn slope(&self) -> f64 {
        self.slope
    }

    /// Returns the length of a tick, rounded up to ns.
    pub(crate) fn tick_ns(&self) -> i64 {
        self.slope.ceil() as i64
    }

    /// Returns the largest distance in ns between the line and a pair that it was fitted to.
    pub(crate) fn residual(&self) -> i64 {
        self.residual
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(tsc: u64, monotonic_ns: u64) -> Pair {
        Pair { tsc, monotonic_ns }
    }

    #[test]
    fn a_line_goes_through_its_pairs_and_back() {
        // 2.1 GHz, days after boot.
        let at = |s: u64| {
            pair(
                700_000_000_000_000 + s * 2_100_000_000,
                s * 1_000_000_000 + 42,
            )
        };
        let line = Line::fit(&[at(0), at(1), at(2), at(60)]).unwrap();
        assert_eq!(line.residual(), 0);
        assert_eq!(line.y(at(30).tsc), 30_000_000_042);
        assert_eq!(line.x(30_000_000_042), at(30).tsc);
        let ns = Line::through(5_000_000_000, -7_000_000_000, 1.0001);
        let there = ns.y(3_600_000_000_000);
        assert_eq!(ns.inverse().y(there as u64), 3_600_000_000_000);
        assert_eq!(line.y(at(0).tsc - 2_100_000_000), -999_999_958);
    }

    #[test]
    fn a_bad_pair_shows_in_the_residual() {
        let line = Line::fit(&[pair(0, 0), pair(1000, 1090), pair(2000, 2000)]).unwrap();
        assert!((30..=90).contains(&line.residual()), "{}", line.residual());
    }

    #[test]
    fn what_makes_no_line_is_refused() {
        assert!(Line::fit(&[]).is_none());
        assert!(Line::fit(&[pair(1, 1)]).is_none());
        assert!(Line::fit(&[pair(1, 1), pair(1, 9)]).is_none());
        assert!(Line::fit(&[pair(9, 1), pair(1, 9)]).is_none());
    }
}
