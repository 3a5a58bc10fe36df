//! `fathom top`: shows the present load of all disks, on a screen, as text, or as JSON.
//!
//! - `feed` receives samples from servers, which may start and stop;
//! - `model` stores the samples; `columns` defines the table, and `words` formats figures;
//! - `state` is the present view, and `keys` changes it;
//! - `view` draws a frame: the `table` of all disks, or the `detail` of one disk with its `heat`
//!   map and `slow` requests, and `help` above them; `look` adapts to the terminal's abilities;
//! - `screen` controls the terminal, `plain` writes text or JSON without one.

mod columns;
mod detail;
mod feed;
mod heat;
mod help;
mod keys;
mod look;
mod model;
mod plain;
#[cfg(test)]
mod samples;
mod screen;
mod slow;
mod state;
mod table;
mod view;
mod words;

use crate::servers::find;
use anyhow::bail;
use clap::Args;
use columns::Column;
use feed::Feed;
pub use feed::Which;
use look::Look;
use state::State;
use std::io::{IsTerminal, stdout};
use std::time::Duration;

/// Range of sampling intervals, the same as in the server.
const INTERVALS: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(500)..=Duration::from_secs(60);

/// Timeout for each reply of a server on this host.
const PATIENCE: Duration = Duration::from_secs(5);

/// Show the load and latency of all disks, live
///
/// The table shows throughput, latency, the time in each stage, and what limits each disk. On a
/// terminal, h shows the keys, and Enter shows one disk with a heat map of its latencies. Otherwise
/// the command prints each interval as text.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Show only this disk, or the server with this process id or API socket [default: all]
    #[arg(value_name = "NAME|PID|SOCKET")]
    name: Option<String>,

    /// Show only disks of this server: its process id or API socket
    #[arg(long, value_name = "PID|SOCKET")]
    server: Option<String>,

    #[command(flatten)]
    view: View,
}

/// How it is shown.
#[derive(Args, Debug)]
pub struct View {
    /// Length of an interval, 500ms to 60s; a number without a unit is in seconds
    #[arg(short, long, value_name = "TIME", default_value = "1s", value_parser = parse_interval)]
    interval: Duration,

    /// Number of intervals to show [default: no limit]
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Print one interval as text and exit
    #[arg(long, conflicts_with = "count")]
    once: bool,

    /// Print JSON, one line per interval
    #[arg(long)]
    json: bool,

    /// Column to sort by
    #[arg(long, value_name = "COLUMN", default_value = "iops")]
    sort: Column,

    /// Show only disks with this text in their name, guest or image
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    filter: String,
}

pub fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = fathom_units::parse_seconds(text)?;
    match INTERVALS.contains(&interval) {
        true => Ok(interval),
        false => Err("must be from 500ms to 60s".to_owned()),
    }
}

pub fn run(args: TopArgs) -> anyhow::Result<()> {
    let found = match (&args.server, &args.name) {
        (Some(server), name) => Some((find(server)?.0, name.clone())),
        (None, Some(name)) => Some(find(name)?),
        (None, None) => None,
    };
    let which = found.map_or(Which::All, |(server, disk)| Which::One {
        server: server.server().clone(),
        disk,
    });
    let is_there = matches!(which, Which::One { .. }) || crate::servers::running().next().is_some();
    if args.view.once && !is_there {
        bail!(
            "no server is running; start one with `fathom serve --config FILE`, or name its socket"
        );
    }
    show(args.view, which, PATIENCE)
}

/// Shows the disks until the user quits. `patience` is the timeout for each reply.
pub fn show(view: View, which: Which, patience: Duration) -> anyhow::Result<()> {
    let look = Look::of_environment();
    let count = if view.once { Some(1) } else { view.count };
    let mut state = State::new(look, view.interval);
    if matches!(which, Which::Fleet(_)) {
        state.columns.insert(0, Column::Host);
    }
    (state.sort, state.filter) = (view.sort, view.filter);
    let is_screen = stdout().is_terminal() && look.can_move && !view.once && !view.json;
    let feed = Feed::start(which, view.interval, patience);
    match is_screen {
        true => screen::run(state, &feed, count),
        false => plain::run(state, &feed, count, view.json),
    }
}
