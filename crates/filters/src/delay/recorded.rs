//! Reads device latencies from a file that `fathom stats --json` wrote.

use super::spread::{Buckets, Spread};
use crate::values::{LONGEST, ticks};
use fathom_trace::{Bucket, Op, Stage, Summary};
use fathom_units::cause;
use std::sync::Arc;
use std::time::Duration;

/// Maximum length of the file, in bytes.
const MAX_LEN: u64 = 16 << 20;

/// Reads the device latencies of each operation, indexed by `Op as usize`.
pub(super) fn read(path: &str) -> Result<[Option<Spread>; Op::COUNT], String> {
    let failed = |error: &dyn std::fmt::Display| format!("{path}: {}", cause(error));
    let metadata = std::fs::metadata(path).map_err(|e| failed(&e))?;
    if !metadata.is_file() || metadata.len() > MAX_LEN {
        return Err(failed(&"not a file that 'fathom stats --json' wrote"));
    }
    let text = std::fs::read_to_string(path).map_err(|e| failed(&e))?;
    let summary: Summary = serde_json::from_str(&text)
        .map_err(|e| failed(&format!("not what 'fathom stats --json' writes: {e}")))?;
    let mut operations = std::array::from_fn(|_| None);
    for op in Op::ALL {
        let of_op = summary.operations.iter().find(|o| o.op == op.name());
        let stages = of_op.iter().flat_map(|o| &o.stages);
        let mut device = stages.filter(|s| s.stage == Stage::Device.name());
        if let Some(device) = device.next() {
            let buckets = buckets(&device.histogram).ok_or_else(|| failed(&WITHOUT))?;
            operations[op as usize] = Some(Spread::Recorded(Arc::new(buckets)));
        }
    }
    Ok(operations)
}

const WITHOUT: &str = "no histograms of a device; write the file again with 'fathom stats --json'";

fn buckets(histogram: &[Bucket]) -> Option<Buckets> {
    let mut up_to = 0u64;
    let mut buckets = Vec::new();
    for Bucket(from, to, count) in histogram.iter().filter(|bucket| bucket.2 > 0) {
        let (from, to) = (of_ns(*from)?, of_ns(*to)?);
        up_to = up_to.checked_add(*count)?;
        buckets.push((from, to.max(from), up_to));
    }
    (!buckets.is_empty()).then_some(Buckets(buckets))
}

/// Converts nanoseconds to ticks.
fn of_ns(ns: f64) -> Option<u64> {
    let time = Duration::try_from_secs_f64(ns / 1e9).ok()?;
    (time <= LONGEST).then(|| ticks(time))
}
