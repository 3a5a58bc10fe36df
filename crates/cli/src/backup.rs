//! `fathom backup`: disks as they were at an instant, while they are used.

mod agent;
mod moment;
mod place;
mod save;

use crate::servers::{absolute, find};
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
    /// The Unix socket at which NBD clients read it, or a directory, for a socket with the disk's name and .backup behind
    /// [default: the socket of front-ends with .backup behind]
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

    /// Have the guest write out what it has in its caches, and write nothing until the backup has begun: the socket of
    /// QEMU's guest agent in it
    #[arg(long, value_name = "unix:PATH", value_parser = parse_socket)]
    guest_agent: Option<PathBuf>,
}

fn parse_socket(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        Some(path) => Ok(path.into()),
        None => Err(format!("'{text}' is not unix:PATH")),
    }
}

impl KeepArgs {
    /// At one instant.
    fn begin(&self, disks: &[&Disk], bitmap: Option<&str>) -> anyhow::Result<Vec<BackupInfo>> {
        let orders = disks.iter().map(|disk| self.order(disk, bitmap));
        let orders = orders.collect::<anyhow::Result<Vec<_>>>()?;
        let mut sockets: Vec<_> = orders
            .iter()
            .filter_map(|order| order.socket.as_ref())
            .collect();
        sockets.sort();
        if let Some(two) = sockets.windows(2).find(|two| two[0] == two[1]) {
            bail!(
                "{}: is one socket for several disks: name a directory (--nbd)",
                two[0].display()
            );
        }
        moment::begin(disks, &orders, self.guest_agent.as_deref())
    }

    fn order(&self, disk: &Disk, bitmap: Option<&str>) -> anyhow::Result<BackupOrder> {
        let elsewhere = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
        let socket = elsewhere(&self.nbd)?.map(|path| match path.is_dir() {
            true => path.join(format!("{}.backup", disk.name)),
            false => path,
        });
        Ok(BackupOrder {
            socket,
            scratch: elsewhere(&self.scratch)?,
            scratch_size: self.scratch_size,
            bitmap: bitmap.map(str::to_owned),
            held: false,
        })
    }
}

/// Ends the backup of that identity, and returns its final state. An error says that what was read must not be used.
fn end(disk: &Disk, id: &str) -> anyhow::Result<BackupInfo> {
    let delete = disk.server.delete(&disk.below("backup"));
    let info: BackupInfo = delete.parameter("id", id).patiently().send()?;
    match &info.problem {
        Some(problem) => bail!("the backup has failed: {problem}"),
        None => Ok(info),
    }
}

/// Keep a disk as it is now, for NBD clients
///
/// Its users go on changing it. What they are about to change is kept before, until `fathom backup stop`.
/// What a guest has in its own caches is not on the disk, unless it is asked to write it out (--guest-agent).
#[derive(Args, Debug)]
struct StartArgs {
    #[command(flatten)]
    target: Target,

    /// Tell what has been changed before, too, as this dirty bitmap says (qemu:dirty-bitmap:NAME). When what was read
    /// is safe, have it advance (`fathom bitmap advance`). If it is not there, it begins with this backup
    #[arg(long, value_name = "NAME")]
    bitmap: Option<String>,

    #[command(flatten)]
    with: WithArgs,

    #[command(flatten)]
    keep: KeepArgs,

    /// Print JSON, a line for each disk
    #[arg(long)]
    json: bool,
}

fn start(args: StartArgs) -> anyhow::Result<()> {
    let disks = args.with.disks(&args.target)?;
    let all: Vec<_> = disks.iter().collect();
    let infos = args.keep.begin(&all, args.bitmap.as_deref())?;
    let mut out = std::io::stdout().lock();
    for info in infos {
        match args.json {
            true => writeln!(out, "{}", serde_json::to_string(&info)?)?,
            false => writeln!(out, "{}", info.uri)?,
        }
    }
    Ok(())
}

/// Other disks.
#[derive(Args, Debug)]
struct WithArgs {
    /// Another disk, of this server or another one here, at the same instant: may be repeated
    #[arg(long, value_name = "NAME")]
    with: Vec<String>,
}

impl WithArgs {
    fn disks(&self, target: &Target) -> anyhow::Result<Vec<Disk>> {
        let others = self.with.iter().map(|name| disk_of(target, name));
        std::iter::once(target.disk()).chain(others).collect()
    }
}

/// The disk of that name: the server's that is meant, if it has one.
fn disk_of(target: &Target, name: &str) -> anyhow::Result<Disk> {
    let first = target.disk()?;
    let disk = Disk::new(first.server, Some(name.to_owned()))?;
    if disk.info().is_ok() {
        return Ok(disk);
    }
    let (server, named) = find(name)?;
    Disk::new(server, named)
}

/// Keep it no more
///
/// Clients that still read it are disconnected. It fails if the backup has failed, before or after the last byte
/// was read: then what was read is of no use.
#[derive(Args, Debug)]
struct StopArgs {
    #[command(flatten)]
    target: Target,

    #[command(flatten)]
    with: WithArgs,

    /// End this backup only, and fail if another one has begun since: the name in its URI [default: whichever there is]
    #[arg(long, value_name = "ID", conflicts_with = "with")]
    id: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn stop(args: StopArgs) -> anyhow::Result<()> {
    let disks = args.with.disks(&args.target)?;
    // (All of them, whatever becomes of the first.)
    let end_one = |disk: &Disk| match &args.id {
        Some(id) => end(disk, id),
        None => end(disk, &present(disk)?),
    };
    let ended: Vec<_> = disks.iter().map(end_one).collect();
    for info in ended {
        let info = info?;
        if args.json {
            writeln!(std::io::stdout(), "{}", serde_json::to_string(&info)?)?;
        }
    }
    Ok(())
}

/// The identity of the disk's backup.
fn present(disk: &Disk) -> anyhow::Result<String> {
    match disk.info()?.backup {
        Some(info) => Ok(info.id),
        None => bail!("there is no backup of disk '{}'", disk.name),
    }
}
