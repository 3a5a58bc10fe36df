//! `fathom fleet list`: lists the disks of all hosts.

use super::answers::{ask, tell};
use super::hosts::Hosts;
use crate::disk::print_list;
use crate::servers::{Disks, Failed};
use clap::Args;
use fathom_client::fleet::Session;
use fathom_metrics::Info;
use serde::Serialize;
use std::io::Write;

/// List the disks of all hosts with their guests and clients
#[derive(Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    hosts: Hosts,

    /// Show only disks with this text in their name
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    filter: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A host and its disks.
#[derive(Serialize)]
struct Host {
    host: String,
    disks: Vec<Info>,
}

#[derive(Serialize)]
struct Told {
    hosts: Vec<Host>,
    failed: Vec<Failed>,
}

pub fn run(args: &ListArgs) -> anyhow::Result<()> {
    let servers = args.hosts.servers()?;
    let disks = async |session: &mut Session<'_>| {
        let disks: Disks = session.get(&["v1", "disks"]).await?;
        Ok(disks.infos())
    };
    let mut hosts = Vec::new();
    let failed = ask(&servers, args.hosts.timeout, disks, |index, mut disks| {
        disks.retain(|disk| disk.name.contains(&args.filter));
        let host = servers[index].to_string();
        hosts.push(Host { host, disks });
    })?;
    hosts.sort_by(|a, b| a.host.cmp(&b.host));
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&Told { hosts, failed })?)?;
        return Ok(());
    }
    let rows = hosts.iter().flat_map(|host| {
        let disks = host
            .disks
            .iter()
            .map(|disk| (host.host.clone(), Some(disk)));
        let is_empty = host.disks.is_empty() && args.filter.is_empty();
        disks.chain(is_empty.then(|| (host.host.clone(), None)))
    });
    print_list(&mut out, "HOST", rows)?;
    tell(&failed, servers.len());
    Ok(())
}
