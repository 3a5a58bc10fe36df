//! `fathom fleet stats`: where the requests of all disks spend their time.

use super::answers::{ask, tell};
use super::hosts::Hosts;
use super::worst::{self, Slow, Worst};
use crate::lab::wrapped;
use crate::servers::{Disks, Failed};
use crate::stats::parse_seconds;
use clap::Args;
use fathom_client::fleet::Session;
use fathom_client::{ClientError, Server};
use fathom_img::shown;
use fathom_trace::{Merged, Summary};
use serde::Serialize;
use std::collections::HashMap;
use std::io::Write;
use std::time::Duration;

/// Show where the requests of all hosts spent their time, and the slowest disks
///
/// Histograms are merged: a percentile is that of all requests together. The figures cover the time
/// since each disk was added, or with --watch each interval.
#[derive(Args, Debug)]
pub struct StatsArgs {
    #[command(flatten)]
    hosts: Hosts,

    /// Include only disks with this text in their name
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    filter: String,

    /// Number of slowest disks to show
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    worst: u16,

    /// Print the requests of each interval of this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    watch: Option<Duration>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The disks of a host, by name.
type Summaries = Vec<(String, Summary)>;

/// The merged statistics of all hosts.
#[derive(Serialize)]
struct Told {
    /// Number of hosts that have replied.
    hosts: usize,
    disks: usize,
    summary: Summary,
    worst: Vec<Slow>,
    failed: Vec<Failed>,
}

pub fn run(args: &StatsArgs) -> anyhow::Result<()> {
    let servers = args.hosts.servers()?;
    // The previous statistics of each disk, by host; used with --watch.
    let mut last = HashMap::new();
    let Some(interval) = args.watch else {
        return print(args, &servers, look(args, &servers, None)?);
    };
    look(args, &servers, Some(&mut last))?;
    loop {
        std::thread::sleep(interval);
        match look(args, &servers, Some(&mut last)) {
            Ok(told) => print(args, &servers, told)?,
            // The hosts may respond again later.
            Err(error) => eprintln!("fathom: {}", fathom_img::shown(&format!("{error:#}"))),
        }
    }
}

async fn summaries(session: &mut Session<'_>, filter: &str) -> Result<Summaries, ClientError> {
    let disks: Disks = session.get(&["v1", "disks"]).await?;
    let mut summaries = Vec::new();
    for disk in disks.infos() {
        if !disk.name.contains(filter) {
            continue;
        }
        match session.get(&["v1", "disks", &disk.name, "stats"]).await {
            Ok(summary) => summaries.push((disk.name, summary)),
            // The disk was removed, or its tenant does not respond. The other disks still count.
            Err(ClientError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(summaries)
}

/// Escapes names of operations and stages, which come from another host.
fn clean(summary: &mut Summary) {
    for op in &mut summary.operations {
        op.op = fathom_img::shown(&op.op);
        for stage in &mut op.stages {
            stage.stage = fathom_img::shown(&stage.stage);
        }
    }
}

/// Queries all hosts and merges their statistics.
///
/// With `last`, the result covers the time since the previous call, and new disks are omitted.
fn look(
    args: &StatsArgs,
    servers: &[Server],
    mut last: Option<&mut HashMap<usize, HashMap<String, Summary>>>,
) -> anyhow::Result<Told> {
    let (mut merged, mut worst) = (Merged::default(), Worst::new(usize::from(args.worst)));
    let mut hosts = 0;
    let ask_one = async |session: &mut Session<'_>| summaries(session, &args.filter).await;
    let failed = ask(
        servers,
        args.hosts.timeout,
        ask_one,
        |index, all: Summaries| {
            hosts += 1;
            let host = servers[index].to_string();
            let before = last
                .as_mut()
                .map(|last| last.insert(index, HashMap::new()).unwrap_or_default());
            for (disk, mut now) in all {
                clean(&mut now);
                let shown = match &before {
                    None => Some(now.clone()),
                    Some(before) => before.get(&disk).map(|then| now.since(then)),
                };
                if let Some(shown) = shown {
                    merged.add(&shown);
                    worst.add(&host, &disk, &shown);
                }
                if let Some(kept) = last.as_mut().and_then(|last| last.get_mut(&index)) {
                    kept.insert(disk, now);
                }
            }
        },
    )?;
    Ok(Told {
        hosts,
        disks: merged.disks(),
        summary: merged.summary(),
        worst: worst.take(),
        failed,
    })
}

/// Returns the sentence that begins the statistics: where requests spend most of their time, and
/// the slowest disk.
fn answer(told: &Told) -> String {
    let whose = format!("{} disks of {} hosts", told.disks, told.hosts);
    // The time of all requests in ns, by stage; the last stage is the total.
    let mut stages: Vec<(&str, f64)> = Vec::new();
    let (mut requests, mut whole) = (0, 0.0);
    for op in &told.summary.operations {
        let Some((total, parts)) = op.stages.split_last() else {
            continue;
        };
        requests += total.count;
        whole += total.mean_ns * total.count as f64;
        for part in parts {
            let ns = part.mean_ns * part.count as f64;
            match stages.iter_mut().find(|(name, _)| *name == part.stage) {
                Some((_, sum)) => *sum += ns,
                None => stages.push((&part.stage, ns)),
            }
        }
    }
    let most = stages.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let Some((stage, ns)) = most.filter(|_| requests > 0 && whole > 0.0) else {
        return format!("{whose} had no requests.");
    };
    let (mean, share) = (worst::time(whole / requests as f64), 100.0 * ns / whole);
    let slowest = told.worst.first().map(|slow| {
        let [host, disk, op] = [&slow.host, &slow.disk, &slow.op].map(|name| shown(name));
        let time = worst::time(slow.rank());
        format!("; the slowest disk is {disk} of {host}, with {time} for a {op} (p99)")
    });
    let slowest = slowest.unwrap_or_default();
    format!("A request to {whose} takes {mean}, {share:.0}% of it in the stage {stage}{slowest}.")
}

fn print(args: &StatsArgs, servers: &[Server], told: Told) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&told)?)?;
        return Ok(out.flush()?);
    }
    writeln!(out, "{}", wrapped(&answer(&told)))?;
    write!(out, "{}", told.summary)?;
    if !told.worst.is_empty() {
        writeln!(out, "\nSlowest disks, by p99:")?;
        worst::print(&mut out, &told.worst)?;
    }
    if args.watch.is_some() {
        writeln!(out)?;
    }
    out.flush()?;
    tell(&told.failed, servers.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_trace::{OpSummary, StageSummary};

    fn told(count: u64) -> Told {
        let stage = |stage: &str, mean_ns: f64| StageSummary {
            stage: stage.to_owned(),
            count,
            mean_ns,
            p50_ns: None,
            p90_ns: None,
            p99_ns: Some(9e6),
            p999_ns: None,
            max_ns: 9e6,
            ticks: 0,
            histogram: Vec::new(),
        };
        let op = OpSummary {
            op: "read".into(),
            errors: 0,
            bytes: 0,
            stages: vec![
                stage("queue", 25e3),
                stage("device", 75e3),
                stage("total", 100e3),
            ],
        };
        let summary = Summary {
            operations: vec![op],
            ..Summary::default()
        };
        let mut worst = Worst::new(1);
        worst.add("h1", "vm7", &summary);
        Told {
            hosts: 2,
            disks: 40,
            summary,
            worst: worst.take(),
            failed: Vec::new(),
        }
    }

    #[test]
    fn statistics_begin_with_their_answer() {
        assert_eq!(
            answer(&told(1000)),
            "A request to 40 disks of 2 hosts takes 100us, 75% of it in the stage device; the \
             slowest disk is vm7 of h1, with 9ms for a read (p99)."
        );
        assert_eq!(answer(&told(0)), "40 disks of 2 hosts had no requests.");
    }
}
