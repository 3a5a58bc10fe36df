//! The merged results of the loads on many hosts.

use crate::servers::Failed;
use fathom_load::{Direction, Latency, Report};
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
    #[serde(flatten)]
    pub latency: Latency,
}

impl Told {
    pub fn fail(&mut self, host: String, problem: &str) {
        let problem = problem.to_owned();
        self.failed.push(Failed { host, problem });
    }

    /// Merges the results of all hosts.
    pub fn merge(&mut self) {
        let mut merged = Merged::default();
        for host in &self.hosts {
            merged.add(&summary(&host.operations));
        }
        let all = merged.summary();
        let operations = all.operations.iter().filter_map(|op| {
            let each = self.hosts.iter().flat_map(|host| &host.operations);
            let these: Vec<_> = each.filter(|one| one.op == op.op).collect();
            Some(together(&op.op, &these, op.stages.last()?))
        });
        self.operations = operations.collect();
        self.iops = self.operations.iter().map(|op| op.iops).sum();
        self.mb_per_s = self.operations.iter().map(|op| op.mb_per_s).sum();
        // The merged result contains the histograms, which are long.
        let each = self.hosts.iter_mut().flat_map(|host| &mut host.operations);
        each.for_each(|one| one.histogram.clear());
        self.began_within_ms = self.spread.map(|spread| spread.as_secs_f64() * 1e3);
    }

    /// Returns the number of requests that were in flight when the measurements ended.
    fn in_flight_at_end(&self) -> u64 {
        let reports = self.hosts.iter().filter_map(|host| host.report.as_ref());
        total(reports.map(|report| report.in_flight_at_end))
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

/// Returns the sum of numbers of hosts, which may send anything.
fn total(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

/// Returns the number of requests whose latencies are known: those of the histogram, which also has
/// the requests that were in flight at the end.
fn samples(one: &Direction) -> u64 {
    match total(one.histogram.iter().map(|bucket| bucket.2)) {
        0 => one.ios,
        n => n,
    }
}

/// Returns the results of an operation of all hosts. `merged` has its percentiles.
fn together(op: &str, these: &[&Direction], merged: &StageSummary) -> Together {
    let sum = |of: fn(&Direction) -> f64| these.iter().map(|one| of(one)).sum::<f64>();
    let count = total(these.iter().map(|one| samples(one)));
    let spent = sum(|one| one.latency.mean_ns * samples(one) as f64);
    let latency = Latency {
        mean_ns: spent / count.max(1) as f64,
        p50_ns: merged.p50_ns,
        p90_ns: merged.p90_ns,
        p99_ns: merged.p99_ns,
        p999_ns: merged.p999_ns,
        max_ns: merged.max_ns,
    };
    // A host without a histogram is missing in the percentiles, so they are not those of all.
    let all = these.iter().all(|one| !one.histogram.is_empty());
    Together {
        op: op.to_owned(),
        ios: total(these.iter().map(|one| one.ios)),
        iops: sum(|one| one.iops),
        mb_per_s: sum(|one| one.mb_per_s),
        latency: latency.known(if all { count } else { 0 }),
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
            count: samples(one),
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
        for name in Latency::COLUMNS {
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
                row(
                    f,
                    &host.name(),
                    &fathom_img::shown(&one.op),
                    one.iops,
                    one.mb_per_s,
                    one.latency.columns(),
                )?;
            }
        }
        for one in &self.operations {
            row(
                f,
                "all hosts",
                &fathom_img::shown(&one.op),
                one.iops,
                one.mb_per_s,
                one.latency.columns(),
            )?;
        }
        match self.in_flight_at_end() {
            0 => {}
            n => writeln!(f, "in flight at the end: {n}; their latencies are above")?,
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

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_trace::Bucket;

    /// Returns a host with `ios` reads in the window, and a histogram of `known` reads.
    fn host(name: &str, ios: u64, mean_ns: f64, known: u64) -> Host {
        let buckets = [Bucket(mean_ns, mean_ns + 1.0, known)];
        let read = Direction {
            op: "read".to_owned(),
            ios,
            iops: ios as f64,
            mb_per_s: 1.0,
            latency: Latency {
                mean_ns,
                max_ns: mean_ns,
                ..Latency::default()
            },
            histogram: buckets.into_iter().filter(|one| one.2 > 0).collect(),
        };
        Host {
            host: name.to_owned(),
            job: None,
            operations: vec![read],
            errors: 0,
            report: None,
        }
    }

    fn merged(hosts: Vec<Host>) -> Told {
        let mut told = Told {
            hosts,
            ..Told::default()
        };
        told.merge();
        told
    }

    #[test]
    fn requests_after_the_window_are_in_latencies_only() {
        // Each host had a request in flight at the end: it is in its histogram, not in `ios`.
        let told = merged(vec![host("a", 29, 1000.0, 30), host("b", 9, 9000.0, 10)]);
        let all = &told.operations[0];
        assert_eq!((all.ios, all.iops), (38, 38.0));
        assert!((all.latency.mean_ns - 3000.0).abs() < 1.0, "{all:?}");
        let median = all.latency.p50_ns.unwrap();
        assert!((median / 1000.0 - 1.0).abs() < 0.01, "{all:?}");
        assert_eq!(
            all.latency.p90_ns, None,
            "only 4 of 40 requests are beyond it"
        );
        let json = serde_json::to_value(all).unwrap();
        assert!(
            json["p90_ns"].is_null() && json["max_ns"] == 9000.0,
            "{json}"
        );
    }

    #[test]
    fn hosts_without_histograms_have_no_percentiles_together() {
        let told = merged(vec![host("a", 100, 1000.0, 100), host("b", 100, 3000.0, 0)]);
        let all = &told.operations[0];
        assert!((all.latency.mean_ns - 2000.0).abs() < 1.0, "{all:?}");
        assert_eq!((all.ios, all.latency.p50_ns), (200, None));
        assert_eq!(all.latency.max_ns, 3000.0);
    }
}
