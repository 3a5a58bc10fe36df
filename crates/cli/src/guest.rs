//! `fathom guest`: commands that run inside a guest.

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

/// Record disk requests inside a guest
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
    /// Make one call for each of many small files; `fathom lab run sharing` starts this command
    #[command(hide = true)]
    Names(NamesArgs),
    Record(RecordArgs),
    /// Measure the CPU and the memory; `fathom lab run attributes` starts this command
    #[command(hide = true)]
    Probe,
}

/// Record a virtio disk of this guest for `fathom breakdown --join`
///
/// Run this command in the guest. The command records the block layer, virtio-blk and its
/// interrupts into memory, and then writes a run directory. `fathom breakdown --join` joins it with
/// a run that was recorded on the host at the same time.
#[derive(Debug, Args)]
struct RecordArgs {
    /// Disk to record, if there are several, such as vda
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Time to record, such as 500ms
    #[arg(long, visible_alias = "runtime", value_name = "SECONDS", default_value = "5s", value_parser = parse_window)]
    seconds: Duration,
    /// Memory for the trace of all CPUs in MiB, 1 to 65536 [default: 1/8 of free memory, at most
    /// 256]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=65536))]
    buffer: Option<u32>,
    /// Run directory to create
    #[arg(long, short, value_name = "DIR", default_value = "guest.run")]
    output: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct NamesArgs {
    /// Directory, which is created if it does not exist
    dir: PathBuf,
    /// Call: create, stat, rename or delete
    #[arg(long)]
    call: Call,
    /// Number of files
    #[arg(long)]
    count: u64,
}

/// Makes one call for each file of a directory, and prints a report as JSON.
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
