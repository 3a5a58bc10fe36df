//! `fathom stream`: images that make their own what is below them, while they are used.

use crate::img::parse_format;
use crate::img::watch::{WatchArgs, tell_outcome};
use crate::servers::absolute;
use crate::target::{Disk, Target};
use anyhow::Context;
use clap::{Args, Subcommand};
use fathom_daemon::{StreamInfo, StreamOrder};
use fathom_img::{Event, Format};
use fathom_units::{Size, parse_size};
use std::io::Write;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

/// Between looks how far it is.
const LOOK: Duration = Duration::from_millis(100);

/// Have the images of disks make their own what is below them, or put something else below them, while they are used
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

/// Have a disk's image make its own what is below it
///
/// In the end it has all of its disk, and nothing below it; or the base. Whatever happens, the disk reads the same all the
/// time. Images that are not below it any more are nobody's: remove them.
#[derive(Args, Debug)]
struct StartArgs {
    #[command(flatten)]
    target: Target,

    /// The file that is to be right below it [default: nothing]: an image that is further below now; or another one, for
    /// which it makes its own all that differs
    #[arg(short, long, value_name = "PATH")]
    base: Option<PathBuf>,

    /// The base's format, if it is not below it yet [default: raw, but refuse what looks like another]
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT", requires = "base")]
    base_format: Option<Format>,

    /// Bytes a second [default: as many as there can be]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    speed: Option<u64>,

    /// Return when it is done
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

/// Until it is done.
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
                let problem = problem.as_deref().unwrap_or("it says no more");
                break Err(anyhow::anyhow!("it has failed: {problem}"));
            }
            ("finishing", Some(problem)) => {
                break Err(anyhow::anyhow!(
                    "it is done, but the server still holds the images that the disk does not need any more: {problem}"
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

/// Show how far it is
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

/// End it: what has become the image's own stays so, and the rest is below it as before
///
/// If the disk's images do not answer, this fails after two seconds: the stream is `stopping`, and ends when they do.
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
