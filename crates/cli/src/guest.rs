//! `fathom guest`: what runs inside a guest.

use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use fathom_lab::experiment::probe;
use fathom_lab::tracers::guest::{self, RecordOptions};
use fathom_lab::tracers::remove_all_on_abort;
use fathom_load::files::names::{Call, call_each};
use serde_json::json;

use crate::breakdown::{parse_window, stop_on_signal};
use crate::guest_run;

/// Record a guest's layers, from inside
#[derive(Debug, Args)]
pub struct GuestArgs {
    #[command(subcommand)]
    command: GuestCommand,
}

#[derive(Debug, Subcommand)]
enum GuestCommand {
    /// A round's half in the guest, started by `fathom lab run wiki`
    #[command(hide = true)]
    Run(guest_run::RunArgs),
    /// One call for each of many small files, started by `fathom lab run sharing`
    #[command(hide = true)]
    Names(NamesArgs),
    Record(RecordArgs),
    /// What the CPU and the memory do here, for `fathom lab run attributes`
    #[command(hide = true)]
    Probe,
}

/// Record this machine's virtio disk, as a guest's share of a breakdown
///
/// Records the block layer, virtio-blk and its interrupts into memory, then
/// writes a run directory, which `fathom breakdown --join` puts together with
/// one that was recorded on the host at the same time.
#[derive(Debug, Args)]
struct RecordArgs {
    /// The disk, where there are several: vda, vdb, ...
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// How long to record
    #[arg(long, value_name = "SECONDS", default_value = "5s", value_parser = parse_window)]
    seconds: Duration,
    /// Memory for the trace in MiB, all CPUs together (default: an eighth of
    /// what is free, at most 256)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=65536))]
    buffer: Option<u32>,
    /// The run directory to make
    #[arg(long, short, value_name = "DIR", default_value = "guest.run")]
    output: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct NamesArgs {
    /// The directory, which is made if it is not there
    dir: PathBuf,
    /// create, stat, rename or delete
    #[arg(long)]
    call: Call,
    /// How many files
    #[arg(long)]
    count: u64,
}

/// Prints a report in JSON.
fn names(args: &NamesArgs) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.dir)
        .with_context(|| format!("cannot create {}", args.dir.display()))?;
    let report = call_each(&args.dir, args.call, args.count)?;
    writeln!(stdout(), "{}", serde_json::to_string(&report)?)?;
    Ok(())
}

fn record(args: &RecordArgs) -> anyhow::Result<()> {
    remove_all_on_abort();
    let stop = stop_on_signal()?;
    let device = args.device.as_deref();
    let options = RecordOptions {
        device: device.map(|name| name.strip_prefix("/dev/").unwrap_or(name)),
        window: args.seconds,
        buffer_mib: args.buffer,
        output: &args.output,
        stop: &stop,
    };
    let run = guest::record(&options, &mut || eprintln!("guest: recording"))?;
    for problem in &run.problems {
        eprintln!("fathom: {problem}");
    }
    let streams = run.rounds.iter().flat_map(|round| &round.streams);
    let (events, lost) = streams.fold((0, 0), |(events, lost), stream| {
        (events + stream.events, lost + stream.lost.unwrap_or(0))
    });
    if lost > 0 {
        eprintln!("fathom: {lost} events did not fit into memory: raise --buffer or record less");
    }
    let run = args.output.display();
    match args.json {
        true => writeln!(
            stdout(),
            "{}",
            json!({ "events": events, "lost": lost, "run": run.to_string() })
        )?,
        false => writeln!(stdout(), "{events} events in {run}")?,
    }
    Ok(())
}

/// Runs the command.
pub fn run(args: GuestArgs) -> anyhow::Result<()> {
    match args.command {
        GuestCommand::Run(args) => guest_run::run(args),
        GuestCommand::Names(args) => names(&args),
        GuestCommand::Record(args) => record(&args),
        GuestCommand::Probe => {
            writeln!(stdout(), "{}", probe::print())?;
            Ok(())
        }
    }
}
