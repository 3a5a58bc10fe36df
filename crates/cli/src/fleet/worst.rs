//! The disks with the slowest requests.

use fathom_trace::{OpSummary, Stage, Summary};
use fathom_units::short_duration;
use serde::Serialize;
use std::io::{self, Write};
use std::time::Duration;

/// A disk with its slowest operation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slow {
    pub host: String,
    pub disk: String,
    pub op: String,
    pub count: u64,
    pub mean_ns: f64,
    pub p50_ns: Option<f64>,
    pub p90_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    pub max_ns: f64,
    /// Stage in which the operation spent most of its time.
    pub stage: String,
    pub stage_percent: f64,
}

impl Slow {
    /// Returns the highest known percentile up to p99, which is a lower bound of p99.
    pub fn rank(&self) -> f64 {
        let known = self.p99_ns.or(self.p90_ns).or(self.p50_ns);
        known.filter(|ns| ns.is_finite()).unwrap_or(0.0)
    }
}

/// The slowest disks, up to a number of them.
#[derive(Debug)]
pub struct Worst {
    most: usize,
    all: Vec<Slow>,
}

impl Worst {
    pub fn new(most: usize) -> Worst {
        Worst {
            most,
            all: Vec::new(),
        }
    }

    pub fn add(&mut self, host: &str, disk: &str, summary: &Summary) {
        let each = summary.operations.iter();
        let each = each.filter_map(|op| slow(host, disk, op));
        self.all
            .extend(each.max_by(|a, b| a.rank().total_cmp(&b.rank())));
        // Truncating only sometimes is faster, and the list stays short enough.
        if self.all.len() > 2 * self.most + 64 {
            self.keep();
        }
    }

    fn keep(&mut self) {
        self.all.sort_by(|a, b| {
            let order = b.rank().total_cmp(&a.rank());
            let names = |slow: &Slow| (slow.host.clone(), slow.disk.clone(), slow.op.clone());
            order.then_with(|| names(a).cmp(&names(b)))
        });
        self.all.truncate(self.most);
    }

    /// Returns the disks, slowest first.
    pub fn take(mut self) -> Vec<Slow> {
        self.keep();
        self.all
    }
}

fn slow(host: &str, disk: &str, op: &OpSummary) -> Option<Slow> {
    let (total, stages) = op.stages.split_last()?;
    let most = stages.iter().max_by(|a, b| a.mean_ns.total_cmp(&b.mean_ns));
    Some(Slow {
        host: host.to_owned(),
        disk: disk.to_owned(),
        op: op.op.clone(),
        count: total.count,
        mean_ns: total.mean_ns,
        p50_ns: total.p50_ns,
        p90_ns: total.p90_ns,
        p99_ns: total.p99_ns,
        max_ns: total.max_ns,
        stage: most.map_or_else(String::new, |stage| stage.stage.clone()),
        stage_percent: most.map_or(0.0, |stage| 100.0 * stage.mean_ns / total.mean_ns.max(1e-9)),
    })
}

const HEAD: [&str; 9] = [
    "HOST",
    "DISK",
    "OPERATION",
    "COUNT",
    "MEAN",
    "P50",
    "P99",
    "MAX",
    "MOST OF IT",
];
/// Whether each column is text, which is aligned to the left.
const TEXT: [bool; 9] = [true, true, true, false, false, false, false, false, true];

/// Writes a time that is given in ns.
pub fn time(ns: f64) -> String {
    short_duration(Duration::from_micros((ns / 1e3).clamp(0.0, 1e15) as u64))
}

pub fn print(out: &mut impl Write, worst: &[Slow]) -> io::Result<()> {
    let known = |ns: Option<f64>| ns.map_or_else(|| "-".to_owned(), time);
    let row = |slow: &Slow| {
        let is_known = Stage::ALL.iter().any(|stage| stage.name() == slow.stage);
        let stage = if is_known { &slow.stage } else { "?" };
        [
            fathom_img::shown(&slow.host),
            fathom_img::shown(&slow.disk),
            fathom_img::shown(&slow.op),
            slow.count.to_string(),
            time(slow.mean_ns),
            known(slow.p50_ns),
            known(slow.p99_ns),
            time(slow.max_ns),
            format!("{stage} {:.0}%", slow.stage_percent),
        ]
    };
    let rows: Vec<_> = std::iter::once(HEAD.map(str::to_owned))
        .chain(worst.iter().map(row))
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<_> = (0..HEAD.len())
        .map(|column| width(column).unwrap_or(0))
        .collect();
    for row in &rows {
        let cells = row.iter().zip(&widths).zip(TEXT);
        let cells = cells.map(|((cell, width), is_text)| match is_text {
            true => format!("{cell:<width$}"),
            false => format!("{cell:>width$}"),
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_trace::{Bucket, StageSummary};

    fn of(op: &str, n: u64, us: f64) -> OpSummary {
        let stage = |stage: &str, share: f64, p99| StageSummary {
            stage: stage.to_owned(),
            count: n,
            mean_ns: share * us * 1e3,
            p50_ns: Some(us * 1e3),
            p90_ns: None,
            p99_ns: p99,
            p999_ns: None,
            max_ns: us * 2e3,
            ticks: 0,
            histogram: vec![Bucket(0.0, 1.0, n)],
        };
        let p99 = (n >= 1000).then_some(us * 1.5e3);
        OpSummary {
            op: op.to_owned(),
            errors: 0,
            bytes: 0,
            stages: vec![
                stage("queue", 0.25, None),
                stage("device", 0.75, None),
                stage("total", 1.0, p99),
            ],
        }
    }

    #[test]
    fn the_worst_come_first_also_those_of_few_requests() {
        let mut worst = Worst::new(3);
        for n in 0..500 {
            let summary = Summary {
                operations: vec![
                    of("read", 2000, 100.0 + f64::from(n)),
                    of("write", 2000, 10.0),
                ],
                ..Summary::default()
            };
            worst.add(&format!("h{n}"), "d", &summary);
        }
        let few = Summary {
            operations: vec![of("flush", 3, 9000.0)],
            ..Summary::default()
        };
        worst.add("h7", "slow", &few);
        let worst = worst.take();
        let names: Vec<_> = worst.iter().map(|slow| (&*slow.host, &*slow.op)).collect();
        assert_eq!(names, [("h7", "flush"), ("h499", "read"), ("h498", "read")]);
        let mut text = Vec::new();
        print(&mut text, &worst).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(
            text.contains("device 75%") && text.contains("HOST"),
            "{text}"
        );
    }
}
