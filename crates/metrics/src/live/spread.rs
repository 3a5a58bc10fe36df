//! Durations of requests in an interval.

use super::counted::OpCounted;
use super::sample::Figures;
use fathom_trace::{Stage, middle_of, quantile, range_of};
use std::collections::BTreeMap;

/// Number of a heat map's buckets per doubling; durations are known to about a fifth.
pub const BUCKETS_PER_DOUBLING: u32 = 4;

/// Returns the lower bound of a heat map's bucket in ns, which is the previous one's upper bound.
pub fn bucket_ns(bucket: u32) -> f64 {
    (f64::from(bucket) / f64::from(BUCKETS_PER_DOUBLING)).exp2()
}

fn bucket_of(ns: f64) -> u32 {
    // Negative values become zero.
    (ns.max(1.0).log2() * f64::from(BUCKETS_PER_DOUBLING)) as u32
}

/// Returns the figures of counts from `seconds`, with ticks of this length.
pub fn figures(counted: &OpCounted, seconds: f64, ns_per_tick: f64) -> Figures {
    let us_per_tick = ns_per_tick / 1e3;
    let requests = counted.requests();
    let rate = |n: u64| rate(n, seconds);
    let ranges = counted.buckets.iter().map(|(bucket, n)| {
        let (from, to) = range_of(*bucket);
        (from, to, *n)
    });
    let end = ranges.clone().next_back().map(|(_, to, _)| to);
    let longest = end.map(|end| match counted.max_is_new {
        true => counted.max as f64,
        // Earlier requests may have taken as long, so only the bucket is known.
        false => end.min(counted.max as f64),
    });
    let at = |q| quantile(ranges.clone(), longest.unwrap_or(0.0), q);
    let mean = |ticks: u64| (requests > 0).then(|| ticks as f64 * us_per_tick / requests as f64);
    let stages = Stage::ALL.into_iter().zip(counted.stages);
    let stages = stages.filter_map(|(stage, ticks)| Some((stage.name().to_owned(), mean(ticks)?)));
    Figures {
        requests,
        bytes: counted.bytes,
        errors: counted.errors,
        iops: rate(requests),
        bytes_per_second: rate(counted.bytes),
        errors_per_second: rate(counted.errors),
        mean_us: mean(counted.total),
        p50_us: at(0.5).map(|ticks| ticks * us_per_tick),
        p99_us: at(0.99).map(|ticks| ticks * us_per_tick),
        max_us: longest.map(|ticks| ticks * us_per_tick),
        stages_us: stages.collect(),
    }
}

/// Returns the rate per second.
pub fn rate(n: u64, seconds: f64) -> f64 {
    match seconds > 0.0 {
        true => n as f64 / seconds,
        false => 0.0,
    }
}

/// Returns the durations in a heat map's buckets.
pub fn histogram(counted: &OpCounted, ns_per_tick: f64) -> Vec<(u32, u64)> {
    let mut all = BTreeMap::new();
    for (bucket, n) in &counted.buckets {
        let bucket = bucket_of(middle_of(*bucket) * ns_per_tick);
        *all.entry(bucket).or_default() += n;
    }
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_a_heat_map_have_what_lies_in_them() {
        for ns in [1.0, 2.0, 3.0, 999.0, 1e3, 30e6, 1e10] {
            let bucket = bucket_of(ns);
            let (from, to) = (bucket_ns(bucket), bucket_ns(bucket + 1));
            assert!(from <= ns * 1.000_001 && ns < to, "{ns}: {from} to {to}");
        }
        assert_eq!((bucket_of(0.0), bucket_of(-5.0)), (0, 0));
    }

    #[test]
    fn nothing_has_no_times() {
        let none = figures(&OpCounted::default(), 1.0, 1.0);
        assert_eq!(none, Figures::default());
        assert_eq!(rate(5, 0.0), 0.0);
    }
}
