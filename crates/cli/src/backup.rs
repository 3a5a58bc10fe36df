//! `fathom backup`: disks as they were at an instant, while they are used.

use crate::img::common::RateArg;
use crate::img::watch::{WatchArgs, interrupted, stop_flag, tell_outcome, watched_until};
use crate::img::{format_options, parse_format};
use crate::servers::absolute;
use crate::target::{Disk, Target};
use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand};
use fathom_daemon::{BackupInfo, BackupOrder};
use fathom_files::lock;
use fathom_img::{
    self as img, CompareOptions, Comparison, ConvertOptions, Format, OpenOptions, Source,
    TargetOptions,
};
use fathom_storage::{Cache, EngineKind};
use fathom_units::parse_size;
use serde_json::json;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Keep disks as they are now, to be read while they are used, or copy them so
#[derive(Args, Debug)]
pub struct BackupCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Start(StartArgs),
    Stop(StopArgs),
    Full(Box<FullArgs>),
}

pub fn run(args: BackupCommand) -> anyhow::Result<()> {
    match args.command {
        Command::Start(args) => start(args),
        Command::Stop(args) => stop(args),
        Command::Full(args) => full(*args),
    }
}

/// How it is kept.
#[derive(Args, Debug)]
struct KeepArgs {
    /// The Unix socket at which NBD clients read it [default: that of front-ends with .backup behind]
    #[arg(long, value_name = "unix:PATH", value_parser = parse_socket)]
    nbd: Option<PathBuf>,

    /// Directory of the file, without a name, that keeps what is changed meanwhile [default: where the
    /// image is]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,

    /// So much that file may take: when more has been changed, the backup has failed [default: half of
    /// what is left there at the beginning]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    scratch_size: Option<u64>,
}

fn parse_socket(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        Some(path) => Ok(path.into()),
        None => Err(format!("'{text}' is not unix:PATH")),
    }
}

impl KeepArgs {
    fn begin(&self, disk: &Disk) -> anyhow::Result<BackupInfo> {
        let elsewhere = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
        let order = BackupOrder {
            socket: elsewhere(&self.nbd)?,
            scratch: elsewhere(&self.scratch)?,
            scratch_size: self.scratch_size,
        };
        let put = disk.server.put(&disk.below("backup")).json(&order);
        Ok(put.patiently().send()?)
    }
}

/// As it was at its end; an error if nobody should use what was read.
fn end(disk: &Disk) -> anyhow::Result<BackupInfo> {
    let delete = disk.server.delete(&disk.below("backup")).patiently();
    let info: BackupInfo = delete.send()?;
    match &info.problem {
        Some(problem) => bail!("the backup has failed: {problem}"),
        None => Ok(info),
    }
}

/// Keep a disk as it is now, for NBD clients
///
/// Its users go on changing it. What they are about to change is kept before, until `fathom backup stop`.
/// What a guest has in its own caches is not on the disk: freeze its file systems for a moment (`virsh
/// domfsfreeze`), if they are to be clean.
#[derive(Args, Debug)]
struct StartArgs {
    #[command(flatten)]
    target: Target,

    #[command(flatten)]
    keep: KeepArgs,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn start(args: StartArgs) -> anyhow::Result<()> {
    let info = args.keep.begin(&args.target.disk()?)?;
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string(&info)?)?,
        false => writeln!(out, "{}", info.uri)?,
    }
    Ok(())
}

/// Keep it no more
///
/// Clients that still read it are disconnected. It fails if the backup has failed, before or after the last byte
/// was read: then what was read is of no use.
#[derive(Args, Debug)]
struct StopArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn stop(args: StopArgs) -> anyhow::Result<()> {
    let info = end(&args.target.disk()?)?;
    if args.json {
        writeln!(std::io::stdout(), "{}", serde_json::to_string(&info)?)?;
    }
    Ok(())
}

/// Copy a disk as it is now, while it is used
///
/// There is no file of the target's name until all of it is there and durable; one from before stays as long.
#[derive(Args, Debug)]
struct FullArgs {
    #[command(flatten)]
    target: Target,

    /// The file to make
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Its format
    #[arg(short = 'O', long, value_parser = parse_format, default_value = "qcow2", value_name = "FORMAT")]
    target_format: Format,
    /// Options of that format, or `help`
    #[arg(short = 'o', long = "target-options", value_name = "NAME=VALUE,...")]
    options: Vec<String>,
    /// Compress (qcow2 only)
    #[arg(short, long)]
    compress: bool,
    #[command(flatten)]
    rate: RateArg,
    /// Compare the copy with the disk as it was, before that is let go
    #[arg(long)]
    verify: bool,

    #[command(flatten)]
    keep: KeepArgs,
    #[command(flatten)]
    watch: WatchArgs,
}

fn full(args: FullArgs) -> anyhow::Result<()> {
    let Some(create) = format_options(args.target_format, &args.options)? else {
        return Ok(());
    };
    // (What a link leads to is replaced, not the link.)
    let file = fs::canonicalize(&args.file).unwrap_or_else(|_| args.file.clone());
    refuse_in_use(&file)?;
    let part = beside(&file)?;
    let disk = args.target.disk()?;
    // From here on, what has begun is ended.
    let stop = stop_flag()?;
    signal_hook::flag::register(signal_hook::consts::SIGHUP, stop.clone())?;
    let info = args.keep.begin(&disk)?;
    let options = ConvertOptions {
        target: TargetOptions {
            create,
            cache: Cache::Writeback,
            engine: EngineKind::default(),
            no_create: false,
            target_is_zero: false,
            compress: args.compress,
            sparse: 4096,
            allow_dirs: Vec::new(),
            data_file: None,
        },
        rate: args.rate.rate,
        parallel: 16,
        salvage: false,
        bitmaps: None,
        part: None,
        to_stream: false,
    };
    let copied = copy(&args, &info, &part, &options, &stop);
    // Whatever has become of that, users of the disk are to wait no more.
    let ended = end(&disk);
    let interruption = copied
        .as_ref()
        .err()
        .filter(|e| matches!(e, img::Error::Interrupted));
    let interruption = interruption.map(ToString::to_string);
    let outcome = match copied {
        Ok(same) => ended
            .and(check(same))
            .and_then(|()| refuse_in_use(&file))
            .and_then(|()| replace(&part, &file)),
        // Why the backup has failed is the better reason for what could not be read.
        Err(error) => ended.and(Err(error.into())),
    };
    if outcome.is_err() {
        let _ = fs::remove_file(&part);
    }
    let told = outcome.as_ref().map(|()| json!({}));
    tell_outcome(&args.watch, told);
    if let Some(interruption) = interruption {
        interrupted(&interruption);
    }
    outcome
}

/// A file that is there, but is somebody's disk, stays what it is.
fn refuse_in_use(file: &Path) -> anyhow::Result<()> {
    let Ok(now) = File::open(file) else {
        return Ok(());
    };
    let how = lock::Use {
        writes: true,
        share: false,
    };
    lock::check(file, &now, how).map_err(|error| anyhow!("{}: {error}", file.display()))
}

/// The name that the file has until it is whole: nobody else's.
fn beside(file: &Path) -> anyhow::Result<PathBuf> {
    let Some(name) = file.file_name() else {
        bail!("{}: is not the name of a file", file.display());
    };
    if fs::metadata(file).is_ok_and(|now| !now.is_file()) {
        bail!("{}: is there, and not a file", file.display());
    }
    let mut name = name.to_owned();
    name.push(format!(".{}.part", std::process::id()));
    Ok(file.with_file_name(name))
}

/// What a comparison has found, if one is wanted.
fn copy(
    args: &FullArgs,
    info: &BackupInfo,
    part: &Path,
    options: &ConvertOptions,
    stop: &AtomicBool,
) -> Result<Option<Comparison>, img::Error> {
    // What was kept is gone with its server.
    let open = OpenOptions {
        reconnects: false,
        ..OpenOptions::reading(Some(Format::Raw))
    };
    let before = Source::new(info.uri.as_ref(), open)?;
    let job = |progress: &mut img::Progress<'_>| {
        img::convert(
            std::slice::from_ref(&before),
            part.as_os_str(),
            options,
            progress,
        )?;
        if !args.verify {
            return Ok(None);
        }
        let copy = OpenOptions::reading(Some(args.target_format));
        let copy = Source::new(part.as_os_str(), copy)?;
        img::compare([&before, &copy], CompareOptions::default(), progress).map(Some)
    };
    watched_until(&args.watch, stop, job)
}

fn check(same: Option<Comparison>) -> anyhow::Result<()> {
    match same {
        None
        | Some(Comparison::Identical {
            sizes_differ: false,
        }) => Ok(()),
        Some(found) => bail!("the copy is not the disk: {found:?}"),
    }
}

/// Durably.
fn replace(part: &Path, file: &Path) -> anyhow::Result<()> {
    let failed = || format!("{}: cannot be put there", file.display());
    fs::rename(part, file).with_context(failed)?;
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = File::open(dir.unwrap_or(Path::new("."))).and_then(|dir| dir.sync_all());
    dir.with_context(failed)
}
