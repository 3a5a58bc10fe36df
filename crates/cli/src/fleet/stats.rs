//! Where the requests of all disks spent their time.

use super::answers::{Failed, ask, tell};
use super::hosts::Hosts;
use super::worst::{self, Slow, Worst};
use crate::servers::Disks;
use crate::stats::parse_seconds;
use clap::Args;
use fathom_client::fleet::Session;
use fathom_client::{ClientError, Server};
use fathom_trace::{Merged, Summary};
use serde::Serialize;
use std::collections::HashMap;
use std::io::Write;
use std::time::Duration;

/// Show where the requests of all hosts' disks spent their time, and which disks are the worst
///
/// Histograms are merged: a percentile is that of all requests together. Since the disks came, or
/// with --watch in each interval.
#[derive(Args, Debug)]
pub struct StatsArgs {
    #[command(flatten)]
    hosts: Hosts,

    /// Only disks with this in their name
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,

    /// How many of the worst disks to show
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    worst: u16,

    /// Print what has come every so many seconds
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
        print(args, &servers, look(args, &servers, Some(&mut last))?)?;
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
            // It has gone meanwhile.
            Err(ClientError::Refused { status: 404, .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(summaries)
}

/// Asks all. With `last`, it is what has come since; a disk that was not there says nothing yet.
fn look(
    args: &StatsArgs,
    servers: &[Server],
    mut last: Option<&mut HashMap<(usize, String), Summary>>,
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
            for (disk, now) in all {
                let shown = match &mut last {
                    None => Some(now),
                    Some(last) => {
                        let shown = last.get(&(index, disk.clone())).map(|then| now.since(then));
                        last.insert((index, disk.clone()), now);
                        shown
                    }
                };
                if let Some(shown) = shown {
                    merged.add(&shown);
                    worst.add(&host, &disk, &shown);
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
        writeln!(out, "\nThe worst, by p99 (or what is known of it):")?;
        worst::print(&mut out, &told.worst)?;
    }
    if args.watch.is_some() {
        writeln!(out)?;
    }
    out.flush()?;
    tell(&told.failed, servers.len());
    Ok(())
}
