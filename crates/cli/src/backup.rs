//! `fathom backup`: disks as they were at an instant, while they are used.

mod save;

use crate::servers::absolute;
use crate::target::{Disk, Target};
use anyhow::bail;
use clap::{Args, Subcommand};
use fathom_daemon::{BackupInfo, BackupOrder};
use fathom_units::parse_size;
use std::io::Write;
use std::path::PathBuf;

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
    Full(Box<save::FullArgs>),
    Incremental(Box<save::IncrementalArgs>),
}

pub fn run(args: BackupCommand) -> anyhow::Result<()> {
    match args.command {
        Command::Start(args) => start(args),
        Command::Stop(args) => stop(args),
        Command::Full(args) => save::full(*args),
        Command::Incremental(args) => save::incremental(*args),
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
    fn begin(&self, disk: &Disk, bitmap: Option<&str>) -> anyhow::Result<BackupInfo> {
        let elsewhere = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
        let order = BackupOrder {
            socket: elsewhere(&self.nbd)?,
            scratch: elsewhere(&self.scratch)?,
            scratch_size: self.scratch_size,
            bitmap: bitmap.map(str::to_owned),
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

    /// Tell what has been changed before, too, as this dirty bitmap says (qemu:dirty-bitmap:NAME). When what was read
    /// is safe, have it advance (`fathom bitmap advance`). If it is not there, it begins with this backup
    #[arg(long, value_name = "NAME")]
    bitmap: Option<String>,

    #[command(flatten)]
    keep: KeepArgs,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn start(args: StartArgs) -> anyhow::Result<()> {
    let info = args
        .keep
        .begin(&args.target.disk()?, args.bitmap.as_deref())?;
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
