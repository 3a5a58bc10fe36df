//! Merges the summaries of many disks.
//!
//! The histograms are merged, because percentiles cannot be computed from percentiles.

use super::{Bucket, OpSummary, StageSummary, Summary, stage_names};
use crate::histogram::{FINE, bucket_of, bucket_range, buckets};
use crate::stage::Op;

/// Maximum number of operations, and of stages of each operation.
///
/// The limit holds for each summary that is read and for the merged summary. Fewer exist, but a
/// server of another host may send anything. `MANY_BUCKETS` is the same limit for buckets.
const MANY: usize = 16;
const MANY_BUCKETS: usize = 1 << 12;
/// Maximum number of buckets here that one bucket of a summary is spread over.
const WIDE: usize = 64;
/// Two durations differ if their difference exceeds this share of the longer one.
const ALIKE: f64 = 0.1;

/// Merged summaries of several disks. The clocks of their servers may have different frequencies.
#[derive(Clone, Debug, Default)]
pub struct Merged {
    disks: usize,
    operations: Vec<MergedOp>,
    refused: u64,
    in_flight: u64,
    /// The shortest and the longest time over which summaries were counted, in seconds.
    seconds: Option<(f64, f64)>,
}

#[derive(Clone, Debug)]
struct MergedOp {
    op: String,
    errors: u64,
    bytes: u64,
    stages: Vec<MergedStage>,
}

#[derive(Clone, Debug)]
struct MergedStage {
    stage: String,
    sum_ns: f64,
    max_ns: f64,
    /// Counts by nanoseconds, in buckets of resolution [`FINE`].
    counts: Vec<u64>,
}

impl Merged {
    /// Adds the summary of one more disk. Operations beyond the maximum number are ignored.
    pub fn add(&mut self, summary: &Summary) {
        for op in summary.operations.iter().take(MANY) {
            if let Some(merged) = self.operation(&op.op) {
                merged.add(op);
            }
        }
        self.refused = self.refused.saturating_add(summary.refused);
        self.in_flight = self.in_flight.saturating_add(summary.in_flight);
        let seconds = summary.seconds.unwrap_or(0.0);
        let (least, most) = self.seconds.unwrap_or((seconds, seconds));
        self.seconds = Some((least.min(seconds), most.max(seconds)));
        self.disks += 1;
    }

    /// Returns the number of summaries that were added.
    pub fn disks(&self) -> usize {
        self.disks
    }

    /// Returns the merged summary.
    ///
    /// `seconds` is absent if the disks were counted for different times, because no rate would be
    /// correct.
    pub fn summary(&self) -> Summary {
        let place = |op: &&MergedOp| Op::ALL.iter().position(|one| one.name() == op.op);
        let mut operations: Vec<_> = self.operations.iter().collect();
        operations.sort_by_key(|op| place(op).unwrap_or(Op::COUNT));
        let are_alike = |(least, most): &(f64, f64)| *least > 0.0 && most - least <= ALIKE * most;
        Summary {
            operations: operations.into_iter().map(MergedOp::summary).collect(),
            refused: self.refused,
            in_flight: self.in_flight,
            seconds: self.seconds.filter(are_alike).map(|(_, most)| most),
        }
    }

    /// Returns the operation of this name, or `None` if there are too many operations.
    fn operation(&mut self, op: &str) -> Option<&mut MergedOp> {
        let found = self.operations.iter().position(|one| one.op == op);
        if found.is_none() && self.operations.len() >= MANY {
            return None;
        }
        let index = found.unwrap_or_else(|| {
            self.operations.push(MergedOp {
                op: op.to_owned(),
                errors: 0,
                bytes: 0,
                stages: Vec::new(),
            });
            self.operations.len() - 1
        });
        Some(&mut self.operations[index])
    }
}

impl MergedOp {
    fn add(&mut self, op: &OpSummary) {
        self.errors = self.errors.saturating_add(op.errors);
        self.bytes = self.bytes.saturating_add(op.bytes);
        for from in op.stages.iter().take(MANY) {
            let found = self.stages.iter().position(|one| one.stage == from.stage);
            if found.is_none() && self.stages.len() >= MANY {
                continue;
            }
            let index = found.unwrap_or_else(|| {
                self.stages.push(MergedStage {
                    stage: from.stage.clone(),
                    sum_ns: 0.0,
                    max_ns: 0.0,
                    counts: vec![0; buckets(FINE)],
                });
                self.stages.len() - 1
            });
            self.stages[index].add(from);
        }
    }

    fn summary(&self) -> OpSummary {
        // A server of another version may have a stage that is unknown here. The total comes last.
        let place = |stage: &&MergedStage| match stage_names().position(|name| name == stage.stage)
        {
            Some(index) => (usize::from(stage.stage == "total"), index),
            None => (0, usize::MAX),
        };
        let mut stages: Vec<_> = self.stages.iter().collect();
        stages.sort_by_key(place);
        OpSummary {
            op: self.op.clone(),
            errors: self.errors,
            bytes: self.bytes,
            stages: stages.into_iter().map(MergedStage::summary).collect(),
        }
    }
}

impl MergedStage {
    fn add(&mut self, stage: &StageSummary) {
        self.sum_ns += stage.mean_ns * stage.count as f64;
        self.max_ns = self.max_ns.max(stage.max_ns);
        for Bucket(from, to, n) in stage.histogram.iter().take(MANY_BUCKETS) {
            self.spread(*from, *to, *n);
        }
    }

    /// Spreads `n` samples evenly from `from` to `to`, and loses none.
    fn spread(&mut self, from: f64, to: f64, n: u64) {
        let (first, last) = (bucket_of::<FINE>(from as u64), bucket_of::<FINE>(to as u64));
        let last = last.clamp(first, first + WIDE).min(self.counts.len() - 1);
        let mut placed = 0;
        for index in first..=last {
            let (low, width) = bucket_range::<FINE>(index);
            let part = ((low + width) as f64 - from) / (to - from).max(f64::MIN_POSITIVE);
            let until = match index == last {
                true => n,
                false => ((part.clamp(0.0, 1.0) * n as f64).round() as u64).min(n),
            };
            self.counts[index] = self.counts[index].saturating_add(until - placed);
            placed = until;
        }
    }

    fn summary(&self) -> StageSummary {
        let occupied = self.counts.iter().enumerate().filter(|(_, n)| **n > 0);
        let histogram = occupied.map(|(index, n)| {
            let (low, width) = bucket_range::<FINE>(index);
            Bucket(low as f64, (low + width) as f64, *n)
        });
        let count = self
            .counts
            .iter()
            .fold(0, |sum: u64, n| sum.saturating_add(*n));
        StageSummary {
            mean_ns: self.sum_ns / count.max(1) as f64,
            max_ns: self.max_ns,
            histogram: histogram.collect(),
            ..StageSummary::named(&self.stage)
        }
        .with_quantiles()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::histogram::COARSE;
    use proptest::prelude::*;

    /// Returns the summary of a server that has measured these times, with a clock of this tick.
    fn told(times: &[u64], ns_per_tick: f64) -> Summary {
        let mut counts = crate::histogram::Counts::<COARSE>::default();
        for time in times {
            counts.record((*time as f64 / ns_per_tick) as u64);
        }
        let stages = ["device", "total"];
        let stages = stages.map(|name| StageSummary::of(name, &counts, ns_per_tick));
        let read = OpSummary {
            op: "read".to_owned(),
            errors: 1,
            bytes: 4096 * times.len() as u64,
            stages: stages.to_vec(),
        };
        Summary {
            operations: vec![read],
            refused: 2,
            in_flight: 3,
            seconds: Some(10.0),
        }
    }

    fn merged(summaries: &[Summary]) -> Summary {
        let mut merged = Merged::default();
        summaries.iter().for_each(|one| merged.add(one));
        merged.summary()
    }

    proptest! {
        /// The percentiles of merged disks are those of all their requests, up to the error of
        /// histograms, for any times and clocks of the disks.
        #[test]
        fn percentiles_are_those_of_all_requests(
            disks in proptest::collection::vec(
                (proptest::collection::vec(100u64..50_000_000, 1..400), 0.25f64..1.5), 1..8)
        ) {
            let summaries: Vec<_> = disks.iter().map(|(times, tick)| told(times, *tick)).collect();
            let all = merged(&summaries);
            let mut times: Vec<u64> = disks.iter().flat_map(|(times, _)| times.clone()).collect();
            times.sort_unstable();
            let total = all.operations[0].stages.last().unwrap();
            prop_assert_eq!(total.count, times.len() as u64);
            let sum: u64 = times.iter().sum();
            let mean = sum as f64 / times.len() as f64;
            prop_assert!((total.mean_ns - mean).abs() <= 0.02 * mean + 2.0);
            prop_assert!((total.max_ns - times[times.len() - 1] as f64).abs() < 2.0);
            for (q, found) in [(0.5, total.p50_ns), (0.9, total.p90_ns), (0.99, total.p99_ns)] {
                let Some(found) = found else { continue };
                // Between the neighbours of the rank, up to the width of a bucket.
                let rank = q * times.len() as f64;
                let at = |rank: f64| times[(rank.max(0.0) as usize).min(times.len() - 1)] as f64;
                let (low, high) = (at(rank - 2.0) * 0.96 - 2.0, at(rank + 1.0) * 1.04 + 2.0);
                prop_assert!((low..=high).contains(&found), "{q}: {found}, {low} to {high}");
            }
        }
    }

    #[test]
    fn a_mean_of_percentiles_is_not_what_is_told() {
        // Nine fast disks and a slow one: a tenth of the requests are slow.
        let quick = told(&[100_000; 1000], 1.0);
        let slow = told(&[9_000_000; 1000], 0.4);
        let mut disks = vec![quick; 9];
        disks.push(slow);
        let all = merged(&disks);
        let total = all.operations[0].stages.last().unwrap();
        let p99 = total.p99_ns.unwrap();
        assert!((8_700_000.0..=9_300_000.0).contains(&p99), "{p99}");
        assert!(total.p50_ns.unwrap() < 110_000.0);
        assert_eq!((all.refused, all.in_flight), (20, 30));
        assert_eq!(
            (all.operations[0].errors, all.operations[0].bytes),
            (10, 4096 * 10_000)
        );
        assert_eq!(all.seconds, Some(10.0));
        // A disk that was just added: there is no rate of all disks.
        let mut young = told(&[1], 1.0);
        young.seconds = Some(1.0);
        assert_eq!(merged(&[young, disks.remove(0)]).seconds, None);
    }

    #[test]
    fn whatever_a_server_sends_is_taken_in() {
        let mut summary = told(&[500; 100], 1.0);
        let (nan, most) = (f64::NAN, f64::INFINITY);
        let strange = [
            (nan, nan),
            (0.0, most),
            (9.0, 1.0),
            (-5.0, -1.0),
            (most, most),
            (5.0, nan),
        ];
        let strange = strange
            .iter()
            .map(|(from, to)| Bucket(*from, *to, u64::MAX / 8));
        summary.operations[0].stages[1].histogram = strange.collect();
        summary.operations[0].stages[1].mean_ns = nan;
        summary.operations[0].bytes = u64::MAX;
        let all = merged(&[summary.clone(), summary]);
        assert_eq!(all.operations[0].bytes, u64::MAX);
        assert_eq!(all.operations[0].stages[0].count, 200);
        // A float would round this count up by one.
        let odd = 9_007_199_254_740_995;
        let mut summary = told(&[500; 100], 1.0);
        summary.operations[0].stages[1].histogram = vec![Bucket(0.0, 1.0, odd)];
        assert_eq!(merged(&[summary]).operations[0].stages[1].count, odd);
        // Each summary has other names.
        let named = |n: u32| {
            let mut summary = told(&[500], 1.0);
            summary.operations[0].op = n.to_string();
            summary.operations[0].stages[0].stage = n.to_string();
            summary
        };
        let many: Vec<_> = (0..100).map(named).collect();
        assert_eq!(merged(&many).operations.len(), MANY);
    }

    #[test]
    fn what_is_unknown_stays() {
        let mut summary = told(&[500], 1.0);
        let read = &mut summary.operations[0];
        read.stages[0].stage = "teleport".to_owned();
        let mut other = read.clone();
        other.op = "warp".to_owned();
        summary.operations.insert(0, other);
        let all = merged(&[summary.clone(), summary, told(&[500], 1.0)]);
        let ops: Vec<_> = all.operations.iter().map(|op| &*op.op).collect();
        assert_eq!(ops, ["read", "warp"]);
        let stages = all.operations[0].stages.iter();
        let stages: Vec<_> = stages.map(|stage| (&*stage.stage, stage.count)).collect();
        assert_eq!(stages, [("device", 1), ("teleport", 2), ("total", 3)]);
    }
}
