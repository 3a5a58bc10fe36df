//! Exemplars: known slow requests, attached to the buckets that count them.
//!
//! The library supports exemplars only for its own histograms, so they are inserted into its
//! output.

use super::families::{DURATION, each_op};
use super::measured::Measured;
use super::scale::TOTAL;
use fathom_trace::SlowRequest;
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model::{
    Exemplar, LabelPair, MetricFamily,
};
use prost_types::Timestamp;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// Slow requests by the index of a histogram in its family, and the index of a bucket.
pub struct Exemplars<'a>(BTreeMap<(usize, usize), &'a SlowRequest>);

/// Number of lines before the buckets of a histogram: its sum and its count.
const BEFORE: usize = 2;

impl<'a> Exemplars<'a> {
    pub fn of(disks: &'a [Measured]) -> Result<Exemplars<'a>, fmt::Error> {
        let mut all = BTreeMap::new();
        let mut series = 0;
        for disk in disks {
            each_op(disk, |_, of_op| {
                // The slowest request of a bucket comes last and remains.
                for one in of_op.slow() {
                    let seconds = one.total_ns as f64 / 1e9;
                    let bucket = TOTAL.partition_point(|bound| *bound < seconds);
                    all.insert((series, bucket), one);
                }
                series += 1;
                Ok(())
            })?;
        }
        Ok(Exemplars(all))
    }

    /// Inserts the exemplars into the OpenMetrics text of their family.
    pub fn into_text(self, family: &str, out: &mut impl Write) -> fmt::Result {
        let head = family.find("\nfathom_").map_or(family.len(), |at| at + 1);
        let of_histogram = BEFORE + TOTAL.len();
        let mut lines = family[head..].split_inclusive('\n').enumerate();
        let mut rest = family;
        for ((series, bucket), one) in self.0 {
            let wanted = series * of_histogram + BEFORE + bucket;
            let Some((_, line)) = lines.find(|(number, _)| *number == wanted) else {
                break;
            };
            let end = line.as_ptr() as usize - rest.as_ptr() as usize + line.len();
            let (until, after) = rest.split_at(end);
            out.write_str(until.trim_end_matches('\n'))?;
            write_exemplar(out, one)?;
            rest = after;
        }
        out.write_str(rest)
    }

    /// Inserts the exemplars into the families of Prometheus's protobuf format.
    pub fn into_families(self, families: &mut [MetricFamily]) {
        let name = format!("fathom_{DURATION}_seconds");
        let Some(family) = families.iter_mut().find(|family| family.name == name) else {
            return;
        };
        for ((series, bucket), one) in self.0 {
            let metric = family.metric.get_mut(series);
            let histogram = metric.and_then(|metric| metric.histogram.as_mut());
            if let Some(bucket) = histogram.and_then(|all| all.bucket.get_mut(bucket)) {
                bucket.exemplar = Some(exemplar(one));
            }
        }
    }
}

fn write_exemplar(out: &mut impl Write, one: &SlowRequest) -> fmt::Result {
    let SlowRequest { id, longest, .. } = one;
    let (seconds, ms) = (one.total_ns as f64 / 1e9, one.time_ms);
    let (time, rest) = (ms / 1000, ms % 1000);
    writeln!(
        out,
        " # {{slow=\"{id}\",stage=\"{longest}\"}} {seconds} {time}.{rest:03}"
    )
}

fn exemplar(one: &SlowRequest) -> Exemplar {
    let label = |name: &str, value: &str| LabelPair {
        name: name.to_owned(),
        value: value.to_owned(),
    };
    Exemplar {
        label: vec![label("slow", &one.id), label("stage", &one.longest)],
        value: one.total_ns as f64 / 1e9,
        timestamp: Some(Timestamp {
            seconds: (one.time_ms / 1000) as i64,
            nanos: (one.time_ms % 1000 * 1_000_000) as i32,
        }),
    }
}
