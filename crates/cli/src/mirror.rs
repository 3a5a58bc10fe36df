//! `fathom mirror`: disks that are copied to others while they are used.

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
use fathom_daemon::{Completion, MirrorInfo, MirrorOrder};
use fathom_img::{self as img, Event, Format};
use fathom_storage::Location;
use fathom_units::{Size, parse_size};
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// Between looks how far it is.
const LOOK: Duration = Duration::from_millis(100);

/// Copy disks to other places or formats while they are used, and have them go on there
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

/// Copy a disk to another place while it is used
///
/// What its users change meanwhile is copied again, until both are the same but for what has been changed just now. Then
/// the mirror is ready, and follows the disk: until `fathom mirror complete`, which has the disk go on there, or `fathom
/// mirror stop`, which leaves a copy as of then. When anything goes wrong the mirror has failed, and the disk is as
/// before.
#[derive(Args, Debug)]
struct StartArgs {
    #[command(flatten)]
    target: Target,

    /// Where to: a file, which is made if it is not there; a device, nbd://HOST/NAME or rbd:POOL/IMAGE, of the disk's
    /// size, whose contents are lost
    #[arg(value_name = "TARGET", value_parser = location())]
    to: Location,

    /// The target's format [default: raw, but refuse what looks like another]
    #[arg(short = 'O', long, value_parser = parse_format, value_name = "FORMAT")]
    target_format: Option<Format>,

    /// Options of that format, for a file that is made, or `help`
    #[arg(short = 'o', long = "target-options", value_name = "NAME=VALUE,...")]
    options: Vec<String>,

    /// What unlocks the target, and encrypts a new one, in place of the disk's own keys
    #[command(flatten)]
    keys: KeysArg,

    /// Bytes a second [default: as many as there can be]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    speed: Option<u64>,

    /// Once all has been copied, let users change no more than is copied meanwhile: for disks that are changed faster
    /// than that
    #[arg(long)]
    active: bool,

    /// Return when it is ready
    #[arg(long)]
    wait: bool,

    #[command(flatten)]
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
        None => bail!("{to}: is there already, and -o is for files that are made"),
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
        // Nobody has it.
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

/// A new image there.
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

/// Until it is ready.
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
                let problem = problem.as_deref().unwrap_or("it says no more");
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

/// Show how far a mirror is
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

/// Have a disk go on with the target of its mirror
///
/// If the mirror is not ready yet, this waits until it is. Users wait for some milliseconds. From then on the target is
/// the disk's image, also when the server starts again; the old one stays as it was at that instant, and is nobody's.
#[derive(Args, Debug)]
struct CompleteArgs {
    #[command(flatten)]
    target: Target,

    /// Even if the server would have the old image again when it starts again, since that is said on its command line or
    /// in its configuration: change it there before that
    #[arg(long)]
    unkept: bool,

    /// Even if the disk has dirty bitmaps: they stay with its old image, and the next backup is a full one
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

/// Has the disk go on with the target, once that is ready.
pub fn wait_and_complete(disk: &Disk, how: &Completion, watch: &WatchArgs) -> anyhow::Result<()> {
    wait(disk, watch)?;
    let place = ["v1", "disks", &disk.name, "mirror", "complete"];
    let call = disk.server.post(&place).json(how);
    warn_if_unmarked(&call.patiently().send::<serde_json::Value>()?);
    Ok(())
}

/// End a mirror
///
/// If it is ready, the target is left as a copy of the disk as it is now (its phase is `done`). Otherwise it is of no use.
#[derive(Args, Debug)]
struct StopArgs {
    #[command(flatten)]
    target: Target,

    /// End the mirror at once, even if the target is of no use then or does not answer. A commit whose images do not answer
    /// is `stopping`, and ends when they do
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
            "the mirror is {phase}, not ready: with --force it ends, and the target is of no use"
        );
    }
    let delete = disk.server.delete(&disk.below("mirror"));
    let delete = delete.flag("force", args.force);
    let ended: MirrorInfo = delete.patiently().send()?;
    match (&ended.problem, args.force) {
        (Some(problem), false) => bail!("the target is of no use: {problem}"),
        _ => tell(&ended, args.json),
    }
}
