//! Converts rates and latencies to measures, with the same names and order for all loads.

use fathom_load::Latency;
use fathom_run::{Better, Measure, Unit};

/// Minimum number of samples beyond a percentile for the percentile to be reported.
const BEYOND: f64 = 10.0;

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
pub fn latencies(prefix: &str, latency: &Latency, samples: u64) -> Vec<Measure> {
    let told = |beyond: f64| samples as f64 * beyond >= BEYOND;
    [
        ("mean", latency.mean_ns, samples > 0),
        ("p50", latency.p50_ns, told(0.5)),
        ("p90", latency.p90_ns, told(0.1)),
        ("p99", latency.p99_ns, told(0.01)),
        ("p99.9", latency.p999_ns, told(0.001)),
        ("max", latency.max_ns, samples > 0),
    ]
    .into_iter()
    .filter(|(_, _, is_told)| *is_told)
    .map(|(name, ns, _)| {
        let name = format!("{prefix}latency.{name}");
        Measure::new(name, Unit::Nanoseconds, ns, Better::Lower).of(samples)
    })
    .collect()
}
