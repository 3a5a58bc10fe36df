//! `fathom guest run`: the guest's part of `fathom lab run wiki`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fathom_lab::experiment::wiki::{self, GuestRun};
use fathom_lab::workload::{Limit, Options, Rw};
use fathom_units::{parse_seconds, parse_size};

#[derive(Debug, Args)]
pub struct RunArgs {
    /// Disk
    device: PathBuf,
    /// Run directory to create
    #[arg(long, value_name = "DIR")]
    record: PathBuf,
    /// Load: read, write, randread or randwrite
    #[arg(long, default_value = "read")]
    rw: Rw,
    /// Bytes of a request
    #[arg(long, default_value = "4k", value_parser = parse_size)]
    bs: u64,
    /// Requests in flight
    #[arg(long, default_value_t = 1)]
    iodepth: u32,
    /// Number of requests
    #[arg(long, default_value_t = 10_000)]
    count: u64,
    /// Seconds, instead of --count
    #[arg(long, conflicts_with = "count")]
    seconds: Option<u64>,
    /// Delay every other request by this time before its call
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    inject: Option<Duration>,
    /// Also record the guest's layers
    #[arg(long)]
    trace: bool,
}

/// Runs the load, and communicates with the host over standard input and output.
pub fn run(args: RunArgs) -> anyhow::Result<()> {
    let limit = match args.seconds {
        Some(seconds) => Limit::Time(Duration::from_secs(seconds)),
        None => Limit::Operations(args.count),
    };
    let mut workload = Options::new(args.device)
        .with_rw(args.rw)
        .with_iodepth(args.iodepth)
        .with_limit(limit);
    workload.block_size = args.bs;
    workload.inject = args.inject;
    let run = GuestRun {
        workload,
        trace: args.trace,
        record: args.record,
    };
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    wiki::run_guest(&run, &mut input, &mut output)?;
    Ok(())
}
