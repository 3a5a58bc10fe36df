//! `fathom bitmap`: what of a disk has been changed.

use crate::target::{Disk, Target};
use clap::{Args, Subcommand};
use fathom_client::Call;
use fathom_daemon::{Advance, BitmapInfo, Bitmaps, Merged, NewBitmap, NewName};
use fathom_units::{Size, parse_size};
use std::io::Write;

/// See to a disk's dirty bitmaps, which say what has been changed since a backup
#[derive(Args, Debug)]
pub struct BitmapCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(ListArgs),
    Add(AddArgs),
    Remove(OneArgs),
    /// Have a bitmap advance to the last backup that was begun with it
    ///
    /// That backup has ended, and what was read of it is safe: what had been changed before is no longer told. (`backup
    /// full` and `backup incremental` do this by themselves.)
    Advance(AdvanceArgs),
    /// Begin a bitmap anew: nothing counts as changed
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

    /// The backup, by the `successor` that was told in JSON when it began [default: the last one]
    #[arg(long, value_name = "NUMBER")]
    to: Option<u64>,
}

/// Give a bitmap another name
#[derive(Args, Debug)]
struct RenameArgs {
    #[command(flatten)]
    one: OneArgs,

    /// Its new name
    #[arg(value_name = "NAME")]
    to: String,
}

/// Add to a bitmap what others of the disk say, which stay as they are
#[derive(Args, Debug)]
struct MergeArgs {
    #[command(flatten)]
    one: OneArgs,

    /// The others
    #[arg(value_name = "FROM", required = true)]
    from: Vec<String>,
}

#[derive(Args, Debug)]
struct OneArgs {
    #[command(flatten)]
    target: Target,

    /// The bitmap
    #[arg(value_name = "BITMAP")]
    name: String,
}

/// List a disk's bitmaps: how much has been changed, and whether that is known
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

/// Mark what is changed from now on
///
/// (`backup full --bitmap NAME` does so from the backup's own instant.)
#[derive(Args, Debug)]
struct AddArgs {
    #[command(flatten)]
    one: OneArgs,

    /// What one bit stands for, a power of two [default: 64k, and more of very large disks]
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
