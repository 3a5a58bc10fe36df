//! Converts latencies to buckets that all disks share.
//!
//! The width of a disk's own buckets is in ticks of the clock. The length of a tick is known more
//! exactly each second. But a bucket of a Prometheus histogram must never decrease, which would
//! look like a restart of the server. Therefore one fixed value is used throughout the life of the
//! server and its successors.

use fathom_trace::{BUCKETS, Occupied, middle_of};

/// Upper bounds of the buckets for the total duration of requests, in seconds.
pub const TOTAL: [f64; 23] = [
    1e-6,
    2e-6,
    5e-6,
    1e-5,
    2e-5,
    5e-5,
    1e-4,
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    f64::INFINITY,
];

/// Upper bounds for the time in one stage, in seconds; coarser, as there are six times as many.
pub const STAGE: [f64; 16] = [
    1e-6,
    3e-6,
    1e-5,
    3e-5,
    1e-4,
    3e-4,
    1e-3,
    3e-3,
    1e-2,
    3e-2,
    0.1,
    0.3,
    1.0,
    3.0,
    10.0,
    f64::INFINITY,
];

/// The schema of native histograms, which have 2^SCHEMA buckets per doubling.
///
/// The bounds of bucket n are 2^((n-1)/8) and 2^(n/8) seconds.
pub const SCHEMA: i32 = 3;

/// Number of the first native bucket, and number of buckets, up to five hours.
///
/// Durations below a microsecond are in the zero bucket.
const FIRST: i32 = -159;
const NATIVE: usize = 273;

/// Upper bound of a native histogram's zero bucket, in seconds.
pub const ZERO: f64 = 1.0 / (1 << 20) as f64;

/// Maps each of a disk's own buckets to the shared buckets.
#[derive(Debug)]
pub struct Scale {
    ticks_per_second: f64,
    places: Vec<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    total: u8,
    stage: u8,
    /// Index of the native bucket from [`FIRST`] on. `None`: the zero bucket.
    native: Option<u16>,
}

impl Scale {
    /// Creates the scale for a clock of this frequency, in ticks per second.
    pub fn new(ticks_per_second: f64) -> Scale {
        let place = |bucket| {
            let seconds = middle_of(bucket) / ticks_per_second;
            // The last bound is infinite.
            let of = |bounds: &[f64]| bounds.partition_point(|bound| *bound < seconds) as u8;
            let native = (seconds.log2() * f64::from(1 << SCHEMA)).ceil() as i32;
            let native = u16::try_from(native - FIRST).ok();
            Place {
                total: of(&TOTAL),
                stage: of(&STAGE),
                native: native.map(|native| native.min(NATIVE as u16 - 1)),
            }
        };
        Scale {
            ticks_per_second,
            places: (0..BUCKETS).map(place).collect(),
        }
    }

    /// Returns the length of a tick that a successor must use, too.
    pub fn ticks_per_second(&self) -> f64 {
        self.ticks_per_second
    }

    /// Adds up histograms in the buckets of [`TOTAL`] if `is_total`, otherwise of [`STAGE`].
    pub fn spread<'a>(
        &self,
        histograms: impl Iterator<Item = &'a Occupied>,
        is_total: bool,
    ) -> Spread {
        let mut spread = Spread {
            classic: [0; TOTAL.len()],
            count: 0,
            sum: 0.0,
        };
        for histogram in histograms {
            spread.sum += histogram.sum() as f64 / self.ticks_per_second;
            for (bucket, n) in histogram.buckets() {
                let place = &self.places[bucket];
                let classic = if is_total { place.total } else { place.stage };
                spread.classic[usize::from(classic)] += n;
                spread.count += n;
            }
        }
        spread
    }

    /// Adds up histograms in native buckets.
    pub fn native<'a>(&self, histograms: impl Iterator<Item = &'a Occupied>) -> Native {
        let mut native = Native {
            counts: [0; NATIVE],
            zeroes: 0,
        };
        for (bucket, n) in histograms.flat_map(Occupied::buckets) {
            match self.places[bucket].native {
                Some(place) => native.counts[usize::from(place)] += n,
                None => native.zeroes += n,
            }
        }
        native
    }
}

/// A histogram in seconds.
pub struct Spread {
    /// Counts per bucket, not cumulative; unused buckets at the end are zero.
    classic: [u64; TOTAL.len()],
    pub count: u64,
    pub sum: f64,
}

impl Spread {
    /// Returns the upper bounds and the counts of the buckets, not cumulative.
    pub fn classic<'a>(&'a self, bounds: &'a [f64]) -> impl Iterator<Item = (f64, u64)> + 'a {
        bounds.iter().copied().zip(self.classic)
    }
}

/// A native histogram.
pub struct Native {
    counts: [u64; NATIVE],
    pub zeroes: u64,
}

impl Native {
    /// Returns the spans and deltas of a native histogram.
    ///
    /// A span is a run of buckets: its distance from the end of the previous one, and its length. A
    /// delta is the difference between the counts of a bucket and of the previous one.
    pub fn spans(&self) -> (Vec<(i32, u32)>, Vec<i64>) {
        let (mut spans, mut deltas) = (Vec::<(i32, u32)>::new(), Vec::new());
        let (mut end, mut before) = (0, 0);
        for (index, n) in self.counts.iter().enumerate().filter(|(_, n)| **n > 0) {
            let number = FIRST + index as i32;
            match spans.last_mut() {
                Some((_, len)) if number == end => *len += 1,
                _ => spans.push((number - end, 1)),
            }
            end = number + 1;
            deltas.push(*n as i64 - before);
            before = *n as i64;
        }
        (spans, deltas)
    }
}
