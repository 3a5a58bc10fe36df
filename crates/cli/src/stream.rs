//! `fathom stream`: copies data from backing images into disks' images while they are in use.

use crate::img::parse_format;
use crate::img::watch::{WatchArgs, tell_outcome};
use crate::servers::absolute;
use crate::target::{Disk, Target};
use anyhow::Context;
use clap::{Args, Subcommand};
use fathom_img::{Event, Format};
use fathom_metrics::StreamInfo;
use fathom_requests::StreamOrder;
use fathom_units::{Size, parse_size};
use std::io::Write;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

/// Interval between two queries of the stream's progress.
const LOOK: Duration = Duration::from_millis(100);

/// Copy data from backing images into a disk's image
#[derive(Args, Debug)]
pub struct StreamCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Start(StartArgs),
    Show(ShowArgs),
    Stop(StopArgs),
}

pub fn run(args: StreamCommand) -> anyhow::Result<()> {
    match args.command {
        Command::Start(args) => start(args),
        Command::Show(args) => show(&args),
        Command::Stop(args) => stop(&args),
    }
}

/// Start a stream: make a disk's image independent of its backing images
///
/// In the end the image has all data of the disk and no backing image, or has BASE as its backing
/// image. The contents of the disk do not change, even if the stream fails. Backing images that are
/// not needed any more can then be removed.
#[derive(Args, Debug)]
struct StartArgs {
    #[command(flatten)]
    target: Target,

    /// New backing image [default: none]
    ///
    /// An image further down in the backing chain, or any other image. All data that differs from
    /// it is copied.
    #[arg(short, long, value_name = "PATH")]
    base: Option<PathBuf>,

    /// Format of a base that is not in the backing chain, such as qcow2
    ///
    /// [default: raw, if the base does not look like another format]
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT", requires = "base")]
    base_format: Option<Format>,

    /// Limit of the copy in bytes per second, such as 100M [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    speed: Option<u64>,

    /// Return when the stream is done [default: return when it has started]
    #[arg(long)]
    wait: bool,

    #[command(flatten)]
    watch: WatchArgs,
}

fn start(args: StartArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let order = StreamOrder {
        base: args.base.as_deref().map(absolute).transpose()?,
        format: args.base_format,
        top: None,
        speed: args.speed,
    };
    let put = disk.server.put(&disk.below("stream")).json(&order);
    let begun: StreamInfo = put.patiently().send()?;
    let outcome = match args.wait {
        true => wait(&disk, &args.watch),
        false => Ok(begun),
    };
    let told = outcome.as_ref().map(serde_json::to_value);
    tell_outcome(&args.watch, told.map(Result::unwrap_or_default));
    outcome.map(drop)
}

/// Waits until the stream is done, and reports its progress.
pub fn wait(disk: &Disk, watch: &WatchArgs) -> anyhow::Result<StreamInfo> {
    let size = disk.info()?.size;
    let mut watch = watch.watch();
    let outcome = loop {
        let stream = match stream_of(disk) {
            Ok(stream) => stream,
            Err(error) => break Err(error),
        };
        watch.event(Event::Progress {
            done: size.saturating_sub(stream.left),
            total: size,
        });
        match (&*stream.phase, &stream.problem) {
            ("done", _) => break Ok(stream),
            ("failed", problem) => {
                let problem = problem.as_deref().unwrap_or("unknown reason");
                break Err(anyhow::anyhow!("the copy has failed: {problem}"));
            }
            ("finishing", Some(problem)) => {
                break Err(anyhow::anyhow!(
                    "the stream is done, but the server still holds the images that the disk does not need any more: {problem}"
                ));
            }
            _ => sleep(LOOK),
        }
    };
    watch.end();
    outcome
}

fn stream_of(disk: &Disk) -> anyhow::Result<StreamInfo> {
    let stream = disk.info()?.stream;
    stream.with_context(|| format!("there is no stream of disk '{}'", disk.name))
}

/// Show the progress of a stream
#[derive(Args, Debug)]
struct ShowArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn show(args: &ShowArgs) -> anyhow::Result<()> {
    tell(&stream_of(&args.target.disk()?)?, args.json)
}

fn tell(stream: &StreamInfo, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(stream)?)?;
        return Ok(());
    }
    let StreamInfo {
        base,
        top,
        phase,
        copied,
        left,
        problem,
        ..
    } = stream;
    let base = base.as_deref().unwrap_or("nothing");
    let (copied, left) = (Size(*copied), Size(*left));
    let problem = problem.as_ref().map_or(String::new(), |p| format!(": {p}"));
    match top {
        None => writeln!(
            out,
            "{phase}: {copied} copied, {left} left, then {base} is below it{problem}"
        )?,
        Some(top) => writeln!(
            out,
            "{phase}: {copied} copied, {left} left, then all of {top} is in {base}{problem}"
        )?,
    }
    Ok(())
}

/// Stop a stream
///
/// Copied data stays in the image, and the backing images are the same as before. If the images do
/// not respond, the command fails after two seconds; the stream is in phase `stopping` until they
/// do.
#[derive(Args, Debug)]
struct StopArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn stop(args: &StopArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let ended: StreamInfo = disk
        .server
        .delete(&disk.below("stream"))
        .patiently()
        .send()?;
    tell(&ended, args.json)
}
