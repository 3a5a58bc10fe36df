//! `fathom slow`: shows the slowest recent requests.

use crate::target::Target;
use clap::Args;
use fathom_trace::{SlowRequest, Stage};
use fathom_units::Utc;
use serde::Deserialize;
use std::io::{self, Write};

/// Show a disk's slowest requests
///
/// The server keeps the four slowest requests of each of the last 64 seconds and of each of the
/// last 64 minutes in which there were requests, without tracing. Times are in microseconds;
/// `fathom stats` explains the stages.
#[derive(Args, Debug)]
pub struct SlowArgs {
    #[command(flatten)]
    target: Target,

    /// Maximum number of requests to show
    #[arg(short = 'n', long, value_name = "NUMBER", default_value_t = 20)]
    number: usize,

    /// Show the latest requests instead of the slowest
    #[arg(long)]
    last: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The API's reply.
#[derive(Deserialize)]
struct Answer {
    requests: Vec<SlowRequest>,
}

pub fn run(args: &SlowArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let Answer { mut requests } = disk.server.get(&disk.below("slow")).send()?;
    if args.last {
        requests.sort_by_key(|one| std::cmp::Reverse(one.time_ms));
    }
    requests.truncate(args.number);
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&requests)?)?;
    } else if requests.is_empty() {
        writeln!(out, "no requests yet")?;
    } else {
        print(&mut out, &requests)?;
    }
    Ok(out.flush()?)
}

fn print(out: &mut impl Write, requests: &[SlowRequest]) -> io::Result<()> {
    write!(out, "{:<24}{:>11}", "answered (UTC)", "total us")?;
    for stage in Stage::ALL {
        write!(out, "{:>11}", stage.name())?;
    }
    writeln!(out, "  request")?;
    for one in requests {
        let time = Utc::from_seconds(one.time_ms / 1000);
        let time = format!("{time}.{:03}", one.time_ms % 1000);
        write!(out, "{time:<24}{:>11.1}", one.total_ns as f64 / 1e3)?;
        for stage in Stage::ALL {
            let ns = one.stages.get(stage.name()).copied().unwrap_or(0);
            write!(out, "{:>11.1}", ns as f64 / 1e3)?;
        }
        write!(
            out,
            "  {} {} at {}, queue {}",
            one.op, one.len, one.offset, one.queue
        )?;
        match one.error {
            0 => writeln!(out)?,
            errno => writeln!(
                out,
                ": {}",
                fathom_units::cause(io::Error::from_raw_os_error(errno))
            )?,
        }
    }
    Ok(())
}
