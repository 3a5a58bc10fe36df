//! Summaries of histograms, as a table or JSON.

mod merged;

use crate::clock::Clock;
use crate::histogram::{COARSE, Counts, quantile};
use crate::recorder::StageHistograms;
use crate::stage::{Op, Stage};
pub use merged::Merged;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Where one disk's requests spent their time.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Summary {
    /// Operations that occurred.
    pub operations: Vec<OpSummary>,
    /// Number of requests that were rejected at once, because they violate the protocol or the disk
    /// does not support them. The rejected requests are not in `operations`.
    #[serde(default)]
    pub refused: u64,
    /// Number of requests taken from queues and connections, and not yet answered.
    #[serde(default)]
    pub in_flight: u64,
    /// Time in seconds over which all this was counted. Absent in summaries of older servers.
    #[serde(default)]
    pub seconds: Option<f64>,
}

/// Numbers and times of one operation's requests.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct OpSummary {
    /// Name of the operation, as [`Op::name`] returns it.
    pub op: String,
    /// Number of requests that failed.
    #[serde(default)]
    pub errors: u64,
    /// Number of bytes of the requests that succeeded: data, or ranges that were discarded, zeroed
    /// or queried.
    #[serde(default)]
    pub bytes: u64,
    /// Times of the stages in the order of [`Stage::ALL`], then the total.
    pub stages: Vec<StageSummary>,
}

/// Times in nanoseconds. A percentile is absent if there are too few samples for it.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct StageSummary {
    /// Name of the stage, or `total` for the sum of all stages.
    pub stage: String,
    /// Number of samples, which is the number of requests.
    pub count: u64,
    /// Mean in nanoseconds; 0 without samples.
    pub mean_ns: f64,
    /// Median in nanoseconds.
    pub p50_ns: Option<f64>,
    /// 90th percentile in nanoseconds.
    pub p90_ns: Option<f64>,
    /// 99th percentile in nanoseconds.
    pub p99_ns: Option<f64>,
    /// 99.9th percentile in nanoseconds.
    pub p999_ns: Option<f64>,
    /// Longest time in nanoseconds.
    pub max_ns: f64,
    /// Sum of all samples in ticks of the server's clock, to compute differences between summaries.
    ///
    /// Means are not exact enough for differences, because the duration of a tick becomes known
    /// more exactly over time.
    #[serde(default)]
    pub ticks: u64,
    /// Buckets that are not empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histogram: Vec<Bucket>,
}

/// Number of samples in a range: `[from_ns, to_ns, count]` in JSON.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq)]
pub struct Bucket(pub f64, pub f64, pub u64);

impl Summary {
    /// Merges the histograms of a disk's workers.
    pub fn of<'a>(
        workers: impl IntoIterator<Item = &'a StageHistograms>,
        clock: &Clock,
    ) -> Summary {
        let mut merged = vec![vec![Counts::default(); Stage::COUNT + 1]; Op::COUNT];
        let (mut errors, mut bytes) = ([0; Op::COUNT], [0; Op::COUNT]);
        for worker in workers {
            for op in Op::ALL {
                errors[op as usize] += worker.errors(op);
                bytes[op as usize] += worker.bytes(op);
                for (into, from) in merged[op as usize].iter_mut().zip(worker.counts(op)) {
                    into.merge(&from);
                }
            }
        }
        let ns_per_tick = 1e9 / clock.hz();
        let operations = Op::ALL
            .into_iter()
            .filter(|op| merged[*op as usize][Stage::COUNT].count() > 0)
            .map(|op| OpSummary {
                op: op.name().to_owned(),
                errors: errors[op as usize],
                bytes: bytes[op as usize],
                stages: stage_names()
                    .zip(&merged[op as usize])
                    .map(|(name, counts)| StageSummary::of(name, counts, ns_per_tick))
                    .collect(),
            })
            .collect();
        Summary {
            operations,
            ..Summary::default()
        }
    }

    /// Returns what was counted since an earlier summary of the same disk.
    ///
    /// Returns everything if the disk was removed and added again in between.
    pub fn since(&self, earlier: &Summary) -> Summary {
        let is_fewer = |op: &OpSummary| {
            self.of_op(&op.op)
                .is_none_or(|now| now.count() < op.count())
        };
        if self.seconds < earlier.seconds || earlier.operations.iter().any(is_fewer) {
            return self.clone();
        }
        let before = |op: &OpSummary| earlier.of_op(&op.op);
        let operations = self.operations.iter();
        let operations = operations.map(|op| match before(op) {
            Some(before) => op.since(before),
            None => op.clone(),
        });
        let seconds = self.seconds.zip(earlier.seconds);
        Summary {
            operations: operations.filter(|op| op.count() > 0).collect(),
            refused: self.refused.saturating_sub(earlier.refused),
            in_flight: self.in_flight,
            seconds: seconds.map(|(now, then)| now - then),
        }
    }

    fn of_op(&self, op: &str) -> Option<&OpSummary> {
        self.operations.iter().find(|one| one.op == op)
    }
}

impl OpSummary {
    /// Returns the number of requests.
    pub fn count(&self) -> u64 {
        self.stages.last().map_or(0, |total| total.count)
    }

    fn since(&self, earlier: &OpSummary) -> OpSummary {
        let stages = self.stages.iter().zip(&earlier.stages);
        OpSummary {
            op: self.op.clone(),
            errors: self.errors.saturating_sub(earlier.errors),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            stages: stages.map(|(now, then)| now.since(then)).collect(),
        }
    }
}

/// Returns the names of the rows of every table: the stages, then `total`.
fn stage_names() -> impl Iterator<Item = &'static str> {
    Stage::ALL.into_iter().map(Stage::name).chain(["total"])
}

impl StageSummary {
    fn of(stage: &str, counts: &Counts<COARSE>, ns_per_tick: f64) -> StageSummary {
        let ns = |ticks| ticks as f64 * ns_per_tick;
        let buckets = counts.occupied();
        StageSummary {
            max_ns: ns(counts.max()),
            ticks: counts.sum(),
            mean_ns: counts.mean().unwrap_or(0.0) * ns_per_tick,
            histogram: buckets
                .map(|(from, to, n)| Bucket(ns(from), ns(to), n))
                .collect(),
            ..StageSummary::named(stage)
        }
        .with_quantiles()
    }

    fn named(stage: &str) -> StageSummary {
        StageSummary {
            stage: stage.to_owned(),
            count: 0,
            mean_ns: 0.0,
            p50_ns: None,
            p90_ns: None,
            p99_ns: None,
            p999_ns: None,
            max_ns: 0.0,
            ticks: 0,
            histogram: Vec::new(),
        }
    }

    /// Adds the values that follow from the histogram and the maximum.
    fn with_quantiles(self) -> StageSummary {
        let ranges = self
            .histogram
            .iter()
            .map(|Bucket(from, to, n)| (*from, *to, *n));
        let at = |q| quantile(ranges.clone(), self.max_ns, q);
        StageSummary {
            count: ranges
                .clone()
                .fold(0, |sum: u64, (_, _, n)| sum.saturating_add(n)),
            p50_ns: at(0.5),
            p90_ns: at(0.9),
            p99_ns: at(0.99),
            p999_ns: at(0.999),
            ..self
        }
    }

    /// Returns what was counted since `earlier`. The maximum is exact only to its bucket.
    fn since(&self, earlier: &StageSummary) -> StageSummary {
        let mut before = earlier.histogram.iter().peekable();
        let mut histogram = Vec::new();
        for &Bucket(from, to, n) in &self.histogram {
            // Both histograms have the same buckets. The bounds differ slightly, because the
            // duration of a tick was estimated at different times. Counts never decrease.
            let then = before.next_if(|old| old.0 < f64::midpoint(from, to));
            let then = then.map_or(0, |old| old.2);
            if n > then {
                histogram.push(Bucket(from, to, n - then));
            }
        }
        let ticks = self.ticks.wrapping_sub(earlier.ticks);
        let ns_per_tick = self.mean_ns * self.count as f64 / self.ticks.max(1) as f64;
        let count = self.count.saturating_sub(earlier.count).max(1);
        let top = histogram.last().map_or(0.0, |Bucket(_, to, _)| *to);
        StageSummary {
            mean_ns: ticks as f64 * ns_per_tick / count as f64,
            max_ns: top.min(self.max_ns),
            ticks,
            histogram,
            ..StageSummary::named(&self.stage)
        }
        .with_quantiles()
    }
}

impl Summary {
    /// Writes requests and bytes per second for each operation, and the requests in flight.
    fn fmt_rates(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rates = self.operations.iter().map(|op| match self.seconds {
            Some(seconds) if seconds > 0.0 => {
                let (count, bytes) = (op.count() as f64, op.bytes as f64);
                let (iops, mb) = (count / seconds, bytes / seconds / 1e6);
                format!("{} {iops:.0} IOPS, {mb:.1} MB/s", op.op)
            }
            _ => format!("{} {:.1} MB", op.op, op.bytes as f64 / 1e6),
        });
        let rates: Vec<_> = rates.collect();
        write!(f, "{}; {} in flight", rates.join("; "), self.in_flight)?;
        match self.seconds {
            Some(seconds) => writeln!(f, "; in {seconds:.1} s"),
            None => writeln!(f),
        }
    }

    /// Writes the numbers of failed and rejected requests, if there are any.
    fn fmt_errors(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failed = self.operations.iter().filter(|op| op.errors > 0);
        let failed: Vec<_> = failed
            .map(|op| format!("{} {}", op.errors, op.op))
            .collect();
        if !failed.is_empty() {
            writeln!(f, "answered with an error: {}", failed.join(", "))?;
        }
        match self.refused {
            0 => Ok(()),
            n => writeln!(f, "refused, and not counted above: {n}"),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.operations.is_empty() {
            match self.in_flight {
                0 => writeln!(f, "no requests yet")?,
                n => writeln!(f, "no request answered yet; {n} in flight")?,
            }
            return self.fmt_errors(f);
        }
        writeln!(
            f,
            "{:<13}{:<8}{:>11}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}  (us)",
            "operation", "stage", "count", "mean", "p50", "p90", "p99", "p99.9", "max"
        )?;
        for op in &self.operations {
            for stage in &op.stages {
                write!(f, "{:<13}{:<8}{:>11}", op.op, stage.stage, stage.count)?;
                let columns = [
                    Some(stage.mean_ns),
                    stage.p50_ns,
                    stage.p90_ns,
                    stage.p99_ns,
                    stage.p999_ns,
                    Some(stage.max_ns),
                ];
                for ns in columns {
                    match ns {
                        Some(ns) => write!(f, "{:>10.2}", ns / 1000.0)?,
                        None => write!(f, "{:>10}", "-")?,
                    }
                }
                writeln!(f)?;
            }
        }
        self.fmt_rates(f)?;
        self.fmt_errors(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::{Recorder, some_record};
    use crate::stage::Stamps;
    use std::sync::Arc;

    fn summary_of_reads(n: u64) -> Summary {
        let histograms = Arc::new(StageHistograms::default());
        let mut recorder = Recorder::new(histograms.clone());
        let clock = Clock::get();
        for _ in 0..n {
            let at = |micros| clock.ticks(std::time::Duration::from_micros(micros));
            let mut stamps = Stamps::start(0);
            stamps.enter(Stage::Queue, at(2));
            stamps.enter(Stage::Device, at(5));
            stamps.end(at(50));
            recorder.record(Op::Read, 4096, &stamps, || some_record(&stamps));
        }
        recorder.flush();
        Summary::of([&*histograms], clock)
    }

    #[test]
    fn stage_means_add_up_to_the_total() {
        let summary = summary_of_reads(10_000);
        let stages = &summary.operations[0].stages;
        let (total, parts) = stages.split_last().unwrap();
        let sum: f64 = parts.iter().map(|s| s.mean_ns).sum();
        assert!((sum - total.mean_ns).abs() < 1.0, "{sum} {total:?}");
        for (stage, share) in [
            (Stage::Wake, 0.04),
            (Stage::Queue, 0.06),
            (Stage::Device, 0.9),
        ] {
            let is = parts[stage as usize].mean_ns / total.mean_ns;
            assert!((is - share).abs() < 0.001, "{parts:?}");
        }
        assert!((total.p999_ns.unwrap() / 50_000.0 - 1.0).abs() < 0.05);
    }

    #[test]
    fn the_table_has_a_row_a_stage_and_dashes_for_unknown_tails() {
        let text = summary_of_reads(100).to_string();
        assert_eq!(text.lines().count(), 1 + Stage::COUNT + 2);
        let total = text.lines().nth(1 + Stage::COUNT).unwrap();
        assert!(total.starts_with("read         total           100"));
        assert!(total.contains(" - "), "{total}");
    }

    #[test]
    fn an_interval_is_what_has_come_since() {
        let histograms = Arc::new(StageHistograms::default());
        let mut recorder = Recorder::new(histograms.clone());
        let clock = Clock::get();
        let mut read = |micros, n: u64| {
            for _ in 0..n {
                let mut stamps = Stamps::start(0);
                stamps.enter(Stage::Device, 0);
                stamps.end(clock.ticks(std::time::Duration::from_micros(micros)));
                recorder.record(Op::Read, 4096, &stamps, || some_record(&stamps));
            }
            recorder.flush();
        };
        let now = |seconds| Summary {
            seconds: Some(seconds),
            ..Summary::of([&*histograms], clock)
        };
        read(900, 10_000);
        let first = now(10.0);
        read(100, 5_000);
        let second = now(12.0);
        let interval = second.since(&first);
        let op = &interval.operations[0];
        assert_eq!((op.count(), op.bytes), (5_000, 5_000 * 4096));
        let total = op.stages.last().unwrap();
        for ns in [total.mean_ns, total.p50_ns.unwrap(), total.max_ns] {
            assert!((ns / 100_000.0 - 1.0).abs() < 0.04, "{total:?}");
        }
        let text = interval.to_string();
        assert!(
            text.contains("read 2500 IOPS, 10.2 MB/s; 0 in flight; in 2.0 s"),
            "{text}"
        );
        assert_eq!(second.since(&second).operations, []);
        // The disk was removed and added again, and has fewer requests, or more in less time.
        assert_eq!(first.since(&second), first);
        let young = Summary {
            seconds: Some(1.0),
            ..second.clone()
        };
        assert_eq!(young.since(&first), young);
    }

    #[test]
    fn json_survives_a_round_trip() {
        let summary = summary_of_reads(100);
        let text = serde_json::to_string(&summary).unwrap();
        assert_eq!(serde_json::from_str::<Summary>(&text).unwrap(), summary);
    }
}
