//! `fathom fleet`: shows the disks of many hosts together.
//!
//! - `hosts` selects the hosts, `answers` sends requests to them and reports failures;
//! - `list` and `stats` query each host, `top` (of `fathom top`) streams from all of them.

mod answers;
mod hosts;
mod list;
mod stats;
mod worst;

use crate::top::{self, View, Which};
use clap::{Args, Subcommand};
use hosts::Hosts;

/// Show the disks of many hosts
///
/// The command connects by TLS to the address of `fathom serve --api-listen` on each host. Hosts
/// that do not respond are named, and the others are shown.
#[derive(Args, Debug)]
pub struct FleetCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    List(list::ListArgs),
    Stats(stats::StatsArgs),
    Top(TopArgs),
}

/// Show the load and latency of the disks of all hosts, live
///
/// The screen is that of `fathom top`. The first line has percentiles of all requests together.
/// --sort p99 shows the slowest disks first.
#[derive(Args, Debug)]
struct TopArgs {
    #[command(flatten)]
    hosts: Hosts,

    #[command(flatten)]
    view: View,
}

pub fn run(args: FleetCommand) -> anyhow::Result<()> {
    match args.command {
        Command::List(args) => list::run(&args),
        Command::Stats(args) => stats::run(&args),
        Command::Top(args) => {
            let servers = args.hosts.servers()?;
            top::show(args.view, Which::Fleet(servers.into()), args.hosts.timeout)
        }
    }
}
