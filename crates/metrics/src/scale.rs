//! Latencies in the buckets that all disks have in common.
//!
//! A disk's own buckets are so many ticks of the clock wide. How long a tick takes is known a little
//! better with each second, but a bucket of Prometheus must never lose what it had, which would look
//! like a server that was started again: so one and the same value is used as long as there is a
//! server, by its successors, too.

use fathom_trace::{BUCKETS, Occupied, middle_of};

/// The upper bounds of what a request took in all, in seconds.
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

/// Likewise in one stage: there are six times as many of these.
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

/// A native histogram has so many buckets for each doubling, 2^SCHEMA: the bounds of number n are
/// 2^((n-1)/8) and 2^(n/8) seconds.
pub const SCHEMA: i32 = 3;

/// The numbers of native buckets, up to five hours. What is below, a microsecond, is in its bucket of
/// zeroes.
const FIRST: i32 = -159;
const NATIVE: usize = 273;

/// What a native histogram's bucket of zeroes ends with, in seconds.
pub const ZERO: f64 = 1.0 / (1 << 20) as f64;

/// Where each of a disk's buckets belongs.
#[derive(Debug)]
pub struct Scale {
    ticks_per_second: f64,
    places: Vec<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    total: u8,
    stage: u8,
    /// From [`FIRST`] on; None: among the zeroes.
    native: Option<u16>,
}

impl Scale {
    pub fn new(ticks_per_second: f64) -> Scale {
        let place = |bucket| {
            let seconds = middle_of(bucket) / ticks_per_second;
            // The last one is infinite.
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

    /// For a successor.
    pub fn ticks_per_second(&self) -> f64 {
        self.ticks_per_second
    }

    /// All of these together. `is_total`: in the buckets of [`TOTAL`], else of [`STAGE`].
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

    /// Likewise in native buckets.
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
    /// As many as there are bounds; how many are in each, not in those before it.
    classic: [u64; TOTAL.len()],
    pub count: u64,
    pub sum: f64,
}

impl Spread {
    /// Bounds, and how many are below each and not below the one before.
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
    /// As native histograms are written: runs of buckets (how far from the end of the one before, how
    /// many), and how much more is in each bucket than in the one before it.
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
