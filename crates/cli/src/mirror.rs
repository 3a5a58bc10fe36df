//! `fathom mirror`: copies disks to other images while they are in use.

use crate::img::common::KeysArg;
use crate::img::watch::{WatchArgs, tell_outcome};
use crate::img::{format_options, parse_format};
use crate::servers::absolute;
use crate::snapshot::warn_if_unmarked;
use crate::target::{Disk, Target};
use anyhow::{Context, bail};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use fathom_client::ClientError;
use fathom_img::{self as img, Event, Format};
use fathom_metrics::MirrorInfo;
use fathom_requests::{Completion, MirrorOrder};
use fathom_storage::Location;
use fathom_units::{Size, parse_size};
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// Interval between two queries of the mirror's progress.
const LOOK: Duration = Duration::from_millis(100);

/// Copy a disk to another image and switch to it
#[derive(Args, Debug)]
pub struct MirrorCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Start(Box<StartArgs>),
    Show(ShowArgs),
    Complete(CompleteArgs),
    Stop(StopArgs),
}

pub fn run(args: MirrorCommand) -> anyhow::Result<()> {
    match args.command {
        Command::Start(args) => start(*args),
        Command::Show(args) => show(&args),
        Command::Complete(args) => complete(args),
        Command::Stop(args) => stop(args),
    }
}

/// Start a mirror: copy a disk while it is in use
///
/// Data that changes during the copy is copied again. The mirror is ready when the target has all
/// data except the latest writes. The mirror then copies each write, until `fathom mirror complete`
/// switches the disk to the target, or `fathom mirror stop` leaves the target as a copy of the disk
/// at that moment. If the mirror fails, the disk is unchanged.
#[derive(Args, Debug)]
struct StartArgs {
    #[command(flatten)]
    target: Target,

    /// Target: a new or existing file, a device, nbd://HOST/EXPORT or rbd:POOL/IMAGE
    ///
    /// A file that does not exist is created. An existing target must have the disk's size, and its
    /// contents are lost.
    #[arg(value_name = "TARGET", value_parser = location())]
    to: Location,

    /// Format of the target, such as qcow2 [default: raw, if it does not look like another format]
    #[arg(short = 'O', long, value_parser = parse_format, value_name = "FORMAT", help_heading = "Target")]
    target_format: Option<Format>,

    /// Options of the format of a new file, such as cluster_size=1M; `-o help` lists them
    #[arg(
        short = 'o',
        long = "target-options",
        value_name = "NAME=VALUE,...",
        help_heading = "Target"
    )]
    options: Vec<String>,

    // Without --key the target has the disk's own keys.
    #[command(flatten, next_help_heading = "Target")]
    keys: KeysArg,

    /// Limit of the copy in bytes per second, such as 100M [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Copy")]
    speed: Option<u64>,

    /// Slow down writes of the guest if the copy cannot keep up with them
    #[arg(long, help_heading = "Copy")]
    active: bool,

    /// Return when the mirror is ready [default: return when it has started]
    #[arg(long, help_heading = "Copy")]
    wait: bool,

    #[command(flatten, next_help_heading = "Output")]
    watch: WatchArgs,
}

fn location() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text: OsString| Location::parse(&text))
}

fn start(args: StartArgs) -> anyhow::Result<()> {
    let Some(options) = format_options(args.target_format.unwrap_or(Format::Raw), &args.options)?
    else {
        return Ok(());
    };
    let disk = args.target.disk()?;
    let to = match args.to.path() {
        Some(path) => Location::file(absolute(path)?),
        None => args.to.clone(),
    };
    let made = match to.path().filter(|path| !path.exists()) {
        Some(path) => Some(make(path, options, disk.info()?.size, &args.keys)?),
        None if args.options.is_empty() => None,
        None => bail!("{to}: exists already; omit -o, which is for new files"),
    };
    let order = MirrorOrder {
        target: to,
        format: args.target_format,
        speed: args.speed,
        active: args.active,
        keys: args.keys.absolute()?,
    };
    let put = disk.server.put(&disk.below("mirror")).json(&order);
    let begun: Result<MirrorInfo, _> = put.patiently().send();
    if let (Err(ClientError::Refused { status, .. }), Some(path)) = (&begun, made)
        && (400..500).contains(status)
    {
        // The server has rejected the request, so it does not use the new file.
        let _ = fs::remove_file(path);
    }
    let begun = begun?;
    let outcome = match args.wait {
        true => wait(&disk, &args.watch),
        false => Ok(begun),
    };
    let told = outcome.as_ref().map(serde_json::to_value);
    tell_outcome(&args.watch, told.map(Result::unwrap_or_default));
    outcome.map(drop)
}

/// Creates an image of `size` bytes at `path` for the copy, and returns its path.
fn make(
    path: &Path,
    mut options: img::CreateOptions,
    size: u64,
    keys: &KeysArg,
) -> anyhow::Result<PathBuf> {
    if options.size.is_some_and(|wanted| wanted != size) || options.backing.is_some() {
        bail!(
            "the target has the disk's size, and all of its data: leave size and backing_file out"
        );
    }
    options.size = Some(size);
    img::create(
        &Location::file(path.to_owned()),
        &options,
        false,
        &keys.ring(),
    )?;
    Ok(path.to_owned())
}

/// Waits until the mirror is ready, and reports its progress.
///
/// # Errors
///
/// Fails if the mirror fails or ends, or if the server does not respond.
pub fn wait(disk: &Disk, watch: &WatchArgs) -> anyhow::Result<MirrorInfo> {
    let mut watch = watch.watch();
    let outcome = loop {
        let mirror = match mirror_of(disk) {
            Ok(mirror) => mirror,
            Err(error) => break Err(error),
        };
        let (done, total) = (mirror.copied, mirror.copied + mirror.left);
        watch.event(Event::Progress { done, total });
        match (&*mirror.phase, &mirror.problem) {
            ("ready", _) => break Ok(mirror),
            ("failed", problem) => {
                let problem = problem.as_deref().unwrap_or("unknown reason");
                break Err(anyhow::anyhow!("the mirror has failed: {problem}"));
            }
            ("done", _) => break Err(anyhow::anyhow!("the mirror has ended")),
            _ => sleep(LOOK),
        }
    };
    watch.end();
    outcome
}

fn mirror_of(disk: &Disk) -> anyhow::Result<MirrorInfo> {
    let mirror = disk.info()?.mirror;
    mirror.with_context(|| format!("there is no mirror of disk '{}'", disk.name))
}

/// Show the progress of a mirror
#[derive(Args, Debug)]
struct ShowArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn show(args: &ShowArgs) -> anyhow::Result<()> {
    tell(&mirror_of(&args.target.disk()?)?, args.json)
}

fn tell(mirror: &MirrorInfo, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(mirror)?)?;
        return Ok(());
    }
    let MirrorInfo {
        target,
        phase,
        copied,
        left,
        problem,
        ..
    } = mirror;
    let (copied, left) = (Size(*copied), Size(*left));
    let problem = problem.as_ref().map_or(String::new(), |p| format!(": {p}"));
    writeln!(
        out,
        "{phase}: to {target}, {copied} copied, {left} left{problem}"
    )?;
    Ok(())
}

/// Switch a disk to the target of its mirror
///
/// The command waits until the mirror is ready. Requests wait for some milliseconds. Then the
/// target is the disk's image, also after a restart of the server. The old image stays as it was at
/// that moment, and is not used any more.
#[derive(Args, Debug)]
struct CompleteArgs {
    #[command(flatten)]
    target: Target,

    /// Allow the switch for a disk that would have its old image again after a restart
    ///
    /// The image of such a disk is named on the server's command line or in its configuration.
    /// Change it to the target there before the server restarts.
    #[arg(long = "transient", alias = "unkept")]
    unkept: bool,

    /// Allow the switch for a disk with dirty bitmaps
    ///
    /// The bitmaps stay with the old image, and the next backup must be a full backup.
    #[arg(long)]
    leave_bitmaps: bool,

    #[command(flatten)]
    watch: WatchArgs,
}

fn complete(args: CompleteArgs) -> anyhow::Result<()> {
    let how = Completion {
        unkept: args.unkept,
        leave_bitmaps: args.leave_bitmaps,
    };
    let outcome = wait_and_complete(&args.target.disk()?, &how, &args.watch);
    tell_outcome(
        &args.watch,
        outcome.as_ref().map(|()| serde_json::json!({})),
    );
    outcome
}

/// Waits until the mirror is ready, then switches the disk to the target.
pub fn wait_and_complete(disk: &Disk, how: &Completion, watch: &WatchArgs) -> anyhow::Result<()> {
    wait(disk, watch)?;
    let place = ["v1", "disks", &disk.name, "mirror", "complete"];
    let call = disk.server.post(&place).json(how);
    warn_if_unmarked(&call.patiently().send::<serde_json::Value>()?);
    Ok(())
}

/// Stop a mirror
///
/// If the mirror is ready, the target is a copy of the disk as of now. Otherwise the target is
/// incomplete.
#[derive(Args, Debug)]
struct StopArgs {
    #[command(flatten)]
    target: Target,

    /// Stop the mirror immediately, even if the target is incomplete or does not respond
    ///
    /// A commit whose images do not respond is in phase `stopping` until they do.
    #[arg(long)]
    force: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn stop(args: StopArgs) -> anyhow::Result<()> {
    let disk = args.target.disk()?;
    let phase = mirror_of(&disk)?.phase;
    if !args.force && !["ready", "failed", "done"].contains(&&*phase) {
        bail!(
            "the mirror is {phase}, not ready; with --force it stops, and the target is incomplete"
        );
    }
    let delete = disk.server.delete(&disk.below("mirror"));
    let delete = delete.flag("force", args.force);
    let ended: MirrorInfo = delete.patiently().send()?;
    match (&ended.problem, args.force) {
        (Some(problem), false) => bail!("the target must not be used: {problem}"),
        _ => tell(&ended, args.json),
    }
}
