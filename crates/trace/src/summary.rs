//! Histograms as the figures that people read: a table or JSON.

use crate::clock::Clock;
use crate::histogram::{COARSE, Counts};
use crate::recorder::StageHistograms;
use crate::stage::{Op, Stage};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What one disk's requests spent where.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Summary {
    /// Only operations that occurred.
    pub operations: Vec<OpSummary>,
    /// Requests, none of these, that were refused at once: they break a rule
    /// of their protocol, or the disk cannot do what they ask for.
    #[serde(default)]
    pub refused: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct OpSummary {
    pub op: String,
    /// How many of the requests were answered with an error.
    #[serde(default)]
    pub errors: u64,
    /// In the order of [`Stage::ALL`], then the total.
    pub stages: Vec<StageSummary>,
}

/// Times in nanoseconds; a percentile is absent where there are too few
/// samples for it to mean anything.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct StageSummary {
    pub stage: String,
    pub count: u64,
    pub mean_ns: f64,
    pub p50_ns: Option<f64>,
    pub p90_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    pub p999_ns: Option<f64>,
    pub max_ns: f64,
    /// Of the device and in all, for those who want to replay it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histogram: Vec<Bucket>,
}

/// So many samples lay in this range: `[from_ns, to_ns, count]` in JSON.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq)]
pub struct Bucket(pub f64, pub f64, pub u64);

impl Summary {
    /// Merge the histograms of a disk's workers.
    pub fn of<'a>(
        workers: impl IntoIterator<Item = &'a StageHistograms>,
        clock: &Clock,
    ) -> Summary {
        let mut merged = vec![vec![Counts::default(); Stage::COUNT + 1]; Op::COUNT];
        let mut errors = [0; Op::COUNT];
        for worker in workers {
            for op in Op::ALL {
                errors[op as usize] += worker.errors(op);
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
                stages: stage_names()
                    .zip(&merged[op as usize])
                    .map(|(name, counts)| StageSummary::of(name, counts, ns_per_tick))
                    .collect(),
            })
            .collect();
        Summary {
            operations,
            refused: 0,
        }
    }
}

/// The rows of every table: the stages, then `total`.
fn stage_names() -> impl Iterator<Item = &'static str> {
    Stage::ALL.into_iter().map(Stage::name).chain(["total"])
}

impl StageSummary {
    fn of(stage: &str, counts: &Counts<COARSE>, ns_per_tick: f64) -> StageSummary {
        let quantile = |q| counts.quantile(q).map(|ticks| ticks * ns_per_tick);
        StageSummary {
            stage: stage.to_owned(),
            count: counts.count(),
            mean_ns: counts.mean().unwrap_or(0.0) * ns_per_tick,
            p50_ns: quantile(0.5),
            p90_ns: quantile(0.9),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            max_ns: counts.max() as f64 * ns_per_tick,
            histogram: match stage {
                "device" | "total" => counts
                    .occupied()
                    .map(|(from, to, n)| {
                        Bucket(from as f64 * ns_per_tick, to as f64 * ns_per_tick, n)
                    })
                    .collect(),
                _ => Vec::new(),
            },
        }
    }
}

impl Summary {
    /// What went wrong, if anything did.
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
            writeln!(f, "no requests yet")?;
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
        self.fmt_errors(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::Recorder;
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
            recorder.record(Op::Read, &stamps);
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
        assert_eq!(text.lines().count(), 1 + Stage::COUNT + 1);
        let total = text.lines().last().unwrap();
        assert!(total.starts_with("read         total           100"));
        assert!(total.contains(" - "), "{total}");
    }

    #[test]
    fn json_survives_a_round_trip() {
        let summary = summary_of_reads(100);
        let text = serde_json::to_string(&summary).unwrap();
        assert_eq!(serde_json::from_str::<Summary>(&text).unwrap(), summary);
    }
}
