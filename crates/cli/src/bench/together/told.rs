//! The merged results of the loads on many hosts.

use crate::servers::Failed;
use fathom_load::{Direction, Report};
use fathom_trace::{Merged, OpSummary, StageSummary, Summary};
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// The results of all hosts.
#[derive(Debug, Default, Serialize)]
pub struct Told {
    pub hosts: Vec<Host>,
    /// Hosts that were started, but have no results.
    pub failed: Vec<Failed>,
    /// Time within which all measurements began.
    #[serde(skip)]
    pub spread: Option<Duration>,
    began_within_ms: Option<f64>,
    iops: f64,
    mb_per_s: f64,
    pub operations: Vec<Together>,
}

#[derive(Debug, Serialize)]
pub struct Host {
    pub host: String,
    /// Name of the job, if the host may run several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    pub operations: Vec<Direction>,
    pub errors: u64,
    /// The complete report of the host's load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<Report>,
}

impl Host {
    pub fn of(host: String, mut report: Report) -> Host {
        Host {
            host,
            job: None,
            operations: std::mem::take(&mut report.operations),
            errors: report.errors,
            report: Some(report),
        }
    }

    /// Returns the name of the host and job for messages.
    fn name(&self) -> String {
        let job = self
            .job
            .as_ref()
            .map_or_else(String::new, |job| format!(" {job}"));
        fathom_img::shown(&format!("{}{job}", self.host))
    }
}

/// The results of one operation on all hosts.
///
/// Percentiles are of all requests together, and absent if there are too few requests.
#[derive(Debug, Serialize)]
pub struct Together {
    pub op: String,
    pub ios: u64,
    pub iops: f64,
    pub mb_per_s: f64,
    pub mean_ns: f64,
    pub p50_ns: Option<f64>,
    pub p90_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    pub p999_ns: Option<f64>,
    pub max_ns: f64,
}

impl Told {
    pub fn fail(&mut self, host: String, problem: &str) {
        let problem = problem.to_owned();
        self.failed.push(Failed { host, problem });
    }

    /// Merges the results of all hosts.
    pub fn merge(&mut self) {
        let mut merged = Merged::default();
        for host in &mut self.hosts {
            merged.add(&summary(&host.operations));
            // The merged result contains the histogram, which is long.
            host.operations
                .iter_mut()
                .for_each(|one| one.histogram.clear());
        }
        let all = merged.summary();
        let each = || self.hosts.iter().flat_map(|host| &host.operations);
        let operations = all.operations.iter().filter_map(|op| {
            let total = op.stages.last()?;
            let these = || each().filter(|one| one.op == op.op);
            Some(Together {
                op: op.op.clone(),
                ios: total.count,
                iops: these().map(|one| one.iops).sum(),
                mb_per_s: these().map(|one| one.mb_per_s).sum(),
                mean_ns: total.mean_ns,
                p50_ns: total.p50_ns,
                p90_ns: total.p90_ns,
                p99_ns: total.p99_ns,
                p999_ns: total.p999_ns,
                max_ns: total.max_ns,
            })
        });
        self.operations = operations.collect();
        self.iops = self.operations.iter().map(|op| op.iops).sum();
        self.mb_per_s = self.operations.iter().map(|op| op.mb_per_s).sum();
        self.began_within_ms = self.spread.map(|spread| spread.as_secs_f64() * 1e3);
    }

    /// Returns the number of failed requests on all hosts.
    pub fn errors(&self) -> u64 {
        self.hosts.iter().map(|host| host.errors).sum()
    }

    /// Returns the problems of hosts without results.
    pub fn problems(&self) -> Vec<String> {
        let failed = self.failed.iter();
        failed
            .map(|one| format!("{}: {}", one.host, one.problem))
            .collect()
    }
}

/// Converts results to a summary like those of servers, which can be merged.
fn summary(operations: &[Direction]) -> Summary {
    let operations = operations.iter().map(|one| OpSummary {
        op: one.op.clone(),
        errors: 0,
        bytes: 0,
        stages: vec![StageSummary {
            stage: "total".to_owned(),
            count: one.ios,
            mean_ns: one.latency.mean_ns,
            p50_ns: None,
            p90_ns: None,
            p99_ns: None,
            p999_ns: None,
            max_ns: one.latency.max_ns,
            ticks: 0,
            histogram: one.histogram.clone(),
        }],
    });
    Summary {
        operations: operations.collect(),
        ..Summary::default()
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.hosts.iter().map(|host| host.name().chars().count());
        let width = names.max().unwrap_or(0).max("all hosts".len());
        write!(
            f,
            "{:<width$} {:<13}{:>11} {:>9}",
            "latency in us", "", "IOPS", "MB/s"
        )?;
        for name in ["mean", "p50", "p90", "p99", "p99.9", "max"] {
            write!(f, " {name:>10}")?;
        }
        writeln!(f)?;
        let row = |f: &mut fmt::Formatter<'_>,
                   host: &str,
                   op: &str,
                   iops: f64,
                   mb: f64,
                   ns: [Option<f64>; 6]| {
            write!(
                f,
                "{:<width$} {op:<13}{iops:>11.0} {mb:>9.1}",
                fathom_img::shown(host)
            )?;
            for ns in ns {
                match ns {
                    Some(ns) => write!(f, " {:>10.2}", ns / 1e3)?,
                    None => write!(f, " {:>10}", "-")?,
                }
            }
            writeln!(f)
        };
        for host in &self.hosts {
            for one in &host.operations {
                let l = &one.latency;
                let ns = [l.mean_ns, l.p50_ns, l.p90_ns, l.p99_ns, l.p999_ns, l.max_ns];
                row(
                    f,
                    &host.name(),
                    &fathom_img::shown(&one.op),
                    one.iops,
                    one.mb_per_s,
                    ns.map(Some),
                )?;
            }
        }
        for one in &self.operations {
            let ns = [
                Some(one.mean_ns),
                one.p50_ns,
                one.p90_ns,
                one.p99_ns,
                one.p999_ns,
                Some(one.max_ns),
            ];
            row(
                f,
                "all hosts",
                &fathom_img::shown(&one.op),
                one.iops,
                one.mb_per_s,
                ns,
            )?;
        }
        write!(
            f,
            "{} hosts: {:.0} IOPS, {:.1} MB/s",
            self.hosts.len(),
            self.iops,
            self.mb_per_s
        )?;
        match self.began_within_ms {
            Some(ms) => writeln!(f, "; all began within {ms:.1} ms"),
            None => writeln!(f),
        }
    }
}
