//! `fathom backup`: copies disks as they were at one instant, while they are in use.

mod agent;
mod moment;
mod place;
mod save;

use crate::servers::{absolute, find};
use crate::target::{Disk, Target};
use anyhow::bail;
use clap::{Args, Subcommand};
use fathom_metrics::BackupInfo;
use fathom_requests::BackupOrder;
use fathom_units::parse_size;
use std::io::Write;
use std::path::PathBuf;

/// Back up a disk while it is in use
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

/// How the old data is preserved while the disk changes.
#[derive(Args, Debug)]
struct KeepArgs {
    /// Socket of QEMU's guest agent, to freeze the guest's file systems when the backup starts
    ///
    /// The guest writes its caches to the disk, and pauses writes until the backup has started.
    #[arg(long, value_name = "unix:PATH", value_parser = parse_socket, help_heading = "Guest")]
    guest_agent: Option<PathBuf>,

    /// Unix socket at which NBD clients read the backup, or a directory for it
    ///
    /// In a directory the socket is DISK.backup. [default: the path of the --vhost-user socket with
    /// .backup appended]
    #[arg(long, value_name = "unix:PATH", value_parser = parse_socket, help_heading = "Copy-before-write")]
    nbd: Option<PathBuf>,

    /// Directory for the scratch file, which keeps overwritten data during the backup
    ///
    /// [default: the directory of the image]
    #[arg(long, value_name = "DIR", help_heading = "Copy-before-write")]
    scratch: Option<PathBuf>,

    /// Size limit of the scratch file, such as 20G [default: half of the free space]
    ///
    /// If more data is overwritten during the backup, the backup fails. The guest is not affected.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Copy-before-write")]
    scratch_size: Option<u64>,
}

fn parse_socket(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        Some(path) => Ok(path.into()),
        None => Err(format!("'{text}' is not unix:PATH")),
    }
}

impl KeepArgs {
    /// Begins the backups of all disks at one instant.
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

/// Ends the backup with the identity `id` and returns its final state.
///
/// # Errors
///
/// After an error, data read from the backup must not be used.
fn end(disk: &Disk, id: &str) -> anyhow::Result<BackupInfo> {
    let delete = disk.server.delete(&disk.below("backup"));
    let info: BackupInfo = delete.parameter("id", id).patiently().send()?;
    match &info.problem {
        Some(problem) => bail!("the backup has failed: {problem}"),
        None => Ok(info),
    }
}

/// Export a disk as it is now to NBD clients, for backup programs
///
/// The guest continues to write. The server copies old data to a scratch file before it is
/// overwritten, until `fathom backup stop`. The command prints the NBD URI of the backup. Data in
/// the guest's caches is not in the backup without --guest-agent.
#[derive(Args, Debug)]
struct StartArgs {
    #[command(flatten)]
    target: Target,

    /// Dirty bitmap to export as qemu:dirty-bitmap:NAME, for an incremental backup
    ///
    /// A bitmap that does not exist is added and starts with this backup. When the backup is
    /// durable, run `fathom bitmap advance`.
    #[arg(long, value_name = "NAME")]
    bitmap: Option<String>,

    #[command(flatten)]
    with: WithArgs,

    #[command(flatten)]
    keep: KeepArgs,

    /// Print JSON, one line for each disk
    #[arg(long, help_heading = "Output")]
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
    /// Another disk on this host to back up at the same moment; repeatable
    #[arg(long, value_name = "NAME")]
    with: Vec<String>,
}

impl WithArgs {
    fn disks(&self, target: &Target) -> anyhow::Result<Vec<Disk>> {
        let others = self.with.iter().map(|name| disk_of(target, name));
        std::iter::once(target.disk()).chain(others).collect()
    }
}

/// Returns the disk `name` of the target's server, or if it has none, of any server on this host.
fn disk_of(target: &Target, name: &str) -> anyhow::Result<Disk> {
    let first = target.disk()?;
    let disk = Disk::new(first.server, Some(name.to_owned()))?;
    if disk.info().is_ok() {
        return Ok(disk);
    }
    let (server, named) = find(name)?;
    Disk::new(server, named)
}

/// Stop the export of a disk's backup
///
/// NBD clients of the backup are disconnected. If the command fails, the backup has failed, and the
/// data that was read must not be used.
#[derive(Args, Debug)]
struct StopArgs {
    #[command(flatten)]
    target: Target,

    #[command(flatten)]
    with: WithArgs,

    /// Id of the backup to stop: the name in its URI [default: the present one]
    ///
    /// The command fails if another backup has started since.
    #[arg(long, value_name = "ID", conflicts_with = "with")]
    id: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn stop(args: StopArgs) -> anyhow::Result<()> {
    let disks = args.with.disks(&args.target)?;
    // All backups are ended first, even if one of them fails.
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

/// Returns the identity of the disk's present backup.
fn present(disk: &Disk) -> anyhow::Result<String> {
    match disk.info()?.backup {
        Some(info) => Ok(info.id),
        None => bail!("there is no backup of disk '{}'", disk.name),
    }
}
