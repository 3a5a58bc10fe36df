//! Converts rates and latencies to measures, with the same names and order for all loads.

use fathom_load::Latency;
use fathom_run::{Better, Measure, Unit};

/// Returns the measures `iops` and `throughput` (in MB/s) of this number of requests.
pub fn rates(iops: f64, mb_per_s: f64, requests: u64) -> Vec<Measure> {
    [
        ("iops", Unit::PerSecond, iops),
        ("throughput", Unit::MegabytesPerSecond, mb_per_s),
    ]
    .map(|(name, unit, value)| Measure::new(name, unit, value, Better::Higher).of(requests))
    .into()
}

/// Returns the measures `latency.mean`, `latency.p50` and so on, with the prefix before each name.
/// Returns no measures without samples, and no measure of an unknown percentile.
pub fn latencies(prefix: &str, latency: &Latency, samples: u64) -> Vec<Measure> {
    let known = latency.columns().map(|ns| ns.filter(|_| samples > 0));
    let named = Latency::COLUMNS.into_iter().zip(known);
    let measure = |(column, ns): (&str, Option<f64>)| {
        let name = format!("{prefix}latency.{column}");
        Some(Measure::new(name, Unit::Nanoseconds, ns?, Better::Lower).of(samples))
    };
    named.filter_map(measure).collect()
}
