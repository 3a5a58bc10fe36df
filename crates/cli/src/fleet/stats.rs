//! Where the requests of all disks spent their time.

use super::answers::{ask, tell};
use super::hosts::Hosts;
use super::worst::{self, Slow, Worst};
use crate::servers::{Disks, Failed};
use crate::stats::parse_seconds;
use clap::Args;
use fathom_client::fleet::Session;
use fathom_client::{ClientError, Server};
use fathom_trace::{Merged, Summary};
use serde::Serialize;
use std::collections::HashMap;
use std::io::Write;
use std::time::Duration;

/// Show where the requests of all hosts spent their time, and the slowest disks
///
/// Histograms are merged: a percentile is that of all requests together. The figures cover the time since
/// each disk was added, or with --watch each interval.
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

/// A host's disks, by name.
type Summaries = Vec<(String, Summary)>;

/// What all of them have done.
#[derive(Serialize)]
struct Told {
    /// Those that have answered.
    hosts: usize,
    disks: usize,
    summary: Summary,
    worst: Vec<Slow>,
    failed: Vec<Failed>,
}

pub fn run(args: &StatsArgs) -> anyhow::Result<()> {
    let servers = args.hosts.servers()?;
    // What each disk had done before, where that is of use.
    let mut last = HashMap::new();
    let Some(interval) = args.watch else {
        return print(args, &servers, look(args, &servers, None)?);
    };
    look(args, &servers, Some(&mut last))?;
    loop {
        std::thread::sleep(interval);
        match look(args, &servers, Some(&mut last)) {
            Ok(told) => print(args, &servers, told)?,
            // They may come back.
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
            // It has gone meanwhile, or its tenant cannot tell: that is no reason to know nothing of others.
            Err(ClientError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(summaries)
}

/// Names of operations and stages may be a stranger's.
fn clean(summary: &mut Summary) {
    for op in &mut summary.operations {
        op.op = fathom_img::shown(&op.op);
        for stage in &mut op.stages {
            stage.stage = fathom_img::shown(&stage.stage);
        }
    }
}

/// Asks all. With `last`, it is what has come since; a disk that was not there says nothing yet.
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

fn print(args: &StatsArgs, servers: &[Server], told: Told) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&told)?)?;
        return Ok(out.flush()?);
    }
    writeln!(out, "{} disks of {} hosts:", told.disks, told.hosts)?;
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
