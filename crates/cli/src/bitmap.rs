//! `fathom bitmap`: manages dirty bitmaps, which record changes of a disk.

use crate::target::{Disk, Target};
use clap::{Args, Subcommand};
use fathom_client::Call;
use fathom_metrics::{BitmapInfo, Bitmaps};
use fathom_requests::{Advance, Merged, NewBitmap, NewName};
use fathom_units::{Size, parse_size};
use std::io::Write;

/// Manage dirty bitmaps
///
/// A dirty bitmap records which blocks of a disk have changed, for incremental backups.
#[derive(Args, Debug)]
pub struct BitmapCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(ListArgs),
    Add(AddArgs),
    /// Remove a bitmap
    Remove(OneArgs),
    /// Advance a bitmap to the last backup that used it
    ///
    /// After a backup with `fathom backup start` whose data is durable, the bitmap only has changes
    /// since that backup. `fathom backup full` and `fathom backup incremental` advance the bitmap
    /// themselves.
    Advance(AdvanceArgs),
    /// Clear a bitmap: mark all blocks as unchanged
    Clear(OneArgs),
    Rename(RenameArgs),
    Merge(MergeArgs),
}

pub fn run(args: BitmapCommand) -> anyhow::Result<()> {
    match args.command {
        Command::List(args) => list(args),
        Command::Add(args) => add(args),
        Command::Remove(args) => {
            let disk = args.target.disk()?;
            let call = disk.server.delete(&place(&disk, &args.name));
            call.patiently().send::<Bitmaps>().map(drop)?;
            Ok(())
        }
        Command::Clear(args) => {
            let disk = args.target.disk()?;
            let place = below(&disk, &args.name, "clear");
            done(disk.server.post(&place))
        }
        Command::Rename(args) => {
            let disk = args.one.target.disk()?;
            let to = NewName { to: args.to };
            done(
                disk.server
                    .post(&below(&disk, &args.one.name, "rename"))
                    .json(&to),
            )
        }
        Command::Merge(args) => {
            let disk = args.one.target.disk()?;
            let from = Merged { from: args.from };
            done(
                disk.server
                    .post(&below(&disk, &args.one.name, "merge"))
                    .json(&from),
            )
        }
        Command::Advance(args) => {
            let disk = args.one.target.disk()?;
            advance(&disk, &args.one.name, args.to)
        }
    }
}

fn place<'a>(disk: &'a Disk, name: &'a str) -> [&'a str; 5] {
    ["v1", "disks", &disk.name, "bitmaps", name]
}

fn below<'a>(disk: &'a Disk, name: &'a str, what: &'a str) -> [&'a str; 6] {
    ["v1", "disks", &disk.name, "bitmaps", name, what]
}

fn done(call: Call<'_>) -> anyhow::Result<()> {
    call.patiently().send::<Bitmaps>()?;
    Ok(())
}

pub fn advance(disk: &Disk, name: &str, to: Option<u64>) -> anyhow::Result<()> {
    let post = disk.server.post(&below(disk, name, "advance"));
    done(post.json(&Advance { to }))
}

pub fn all_of(disk: &Disk) -> anyhow::Result<Vec<BitmapInfo>> {
    let found: Bitmaps = disk.server.get(&disk.below("bitmaps")).patiently().send()?;
    Ok(found.bitmaps)
}

#[derive(Args, Debug)]
struct AdvanceArgs {
    #[command(flatten)]
    one: OneArgs,

    /// Backup to advance to [default: the last one]
    ///
    /// The number is `successor` in the output of `fathom backup start --json`.
    #[arg(long, value_name = "NUMBER")]
    to: Option<u64>,
}

/// Rename a bitmap
#[derive(Args, Debug)]
struct RenameArgs {
    #[command(flatten)]
    one: OneArgs,

    /// New name of the bitmap
    #[arg(value_name = "NAME")]
    to: String,
}

/// Merge other bitmaps of the disk into a bitmap
///
/// The other bitmaps are not changed.
#[derive(Args, Debug)]
struct MergeArgs {
    #[command(flatten)]
    one: OneArgs,

    /// Names of the other bitmaps
    #[arg(value_name = "FROM", required = true)]
    from: Vec<String>,
}

#[derive(Args, Debug)]
struct OneArgs {
    #[command(flatten)]
    target: Target,

    /// Name of the bitmap
    #[arg(value_name = "BITMAP")]
    name: String,
}

/// List a disk's bitmaps and how much data has changed
#[derive(Args, Debug)]
struct ListArgs {
    #[command(flatten)]
    target: Target,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn list(args: ListArgs) -> anyhow::Result<()> {
    let bitmaps = all_of(&args.target.disk()?)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&bitmaps)?)?;
        return Ok(());
    }
    for bitmap in bitmaps {
        let BitmapInfo {
            name,
            granularity,
            dirty,
            problem,
            ..
        } = bitmap;
        let (dirty, granularity) = (Size(dirty), Size(granularity));
        let problem = problem.map_or(String::new(), |problem| {
            format!("; all of it counts as changed: {problem}")
        });
        writeln!(
            out,
            "{name}: {dirty} changed, in blocks of {granularity}{problem}"
        )?;
    }
    Ok(())
}

/// Add a bitmap that records changes from now on
///
/// `fathom backup full --bitmap NAME` adds a bitmap that starts at the moment of the backup.
#[derive(Args, Debug)]
struct AddArgs {
    #[command(flatten)]
    one: OneArgs,

    /// Bytes per bit, a power of two [default: 64k, more for very large disks]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    granularity: Option<u64>,
}

fn add(args: AddArgs) -> anyhow::Result<()> {
    let disk = args.one.target.disk()?;
    let new = NewBitmap {
        granularity: args.granularity,
    };
    let put = disk.server.put(&place(&disk, &args.one.name)).json(&new);
    put.patiently().send::<Bitmaps>()?;
    Ok(())
}
