//! `fathom img bitmap`: lists and changes the bitmaps of an image.

use super::image_opts::ImageArg;
use super::{Output, parse_format, print, print_json};
use crate::location_arg::location_parser;
use anyhow::bail;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use fathom_img::{self as img, BitmapChange, BitmapOptions, Format, Listed};
use fathom_storage::Location;
use fathom_units::{Size, parse_size};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Change or list the dirty bitmaps of an image
///
/// A dirty bitmap records which parts of the disk are written. qcow2 images contain their bitmaps.
/// The bitmaps of other images are separate files, for which a command has only one action.
#[derive(Debug, Args)]
pub(super) struct BitmapArgs {
    #[command(flatten)]
    changes: Changes,
    /// List the bitmaps of the image
    #[arg(long, conflicts_with_all = CHANGES)]
    list: bool,
    /// With --add: bytes per bit, a power of two from 512 to 2G
    ///
    /// [default: the size of a cluster, but at least 4k and at most 64k; in separate files 64k, and
    /// more for very large disks]
    #[arg(short, long, value_parser = parse_size, requires = "add", value_name = "SIZE")]
    granularity: Option<u64>,
    /// With --merge: image with the bitmap SOURCE [default: FILE]
    #[arg(short = 'b', long, requires = "merge", value_name = "FILE", value_parser = location_parser())]
    source_file: Option<Location>,
    /// Format of that image [default: detected]
    #[arg(short = 'F', long, value_parser = parse_format, requires = "source_file", value_name = "FORMAT")]
    source_format: Option<Format>,
    /// Directory of bitmaps in separate files, as for `fathom serve` [default: IMAGE.bitmaps]
    #[arg(long, value_name = "DIR")]
    bitmaps: Option<PathBuf>,
    /// With --list: read the image even if another process writes to it
    #[arg(short = 'U', long, conflicts_with_all = CHANGES)]
    force_share: bool,
    /// With --list: print JSON
    #[arg(long, conflicts_with_all = CHANGES)]
    json: bool,
    /// With --list: form of the output, as for qemu-img
    #[arg(
        long,
        value_enum,
        value_name = "FORM",
        default_value = "human",
        conflicts_with_all = CHANGES
    )]
    output: Output,
    #[command(flatten)]
    image: ImageArg,
    /// Name of the bitmap
    #[arg(
        value_name = "BITMAP",
        required_unless_present = "list",
        conflicts_with = "list"
    )]
    bitmap: Option<String>,
}

/// The options that change a bitmap.
const CHANGES: [&str; 6] = ["add", "remove", "clear", "enable", "disable", "merge"];

/// The actions, in the order of the command line.
#[derive(Debug)]
struct Changes(Vec<BitmapChange>);

impl Args for Changes {
    fn augment_args(command: Command) -> Command {
        let flag = |name: &'static str, help: &'static str| {
            let arg = Arg::new(name).long(name).help(help);
            arg.action(ArgAction::Append)
                .num_args(0)
                .default_missing_value("")
        };
        command
            .next_help_heading("Actions, in the given order (all or none are done)")
            .arg(flag("add", "Add an empty, enabled bitmap"))
            .arg(flag("remove", "Remove the bitmap"))
            .arg(flag("clear", "Mark the whole disk as clean"))
            .arg(flag("enable", "Record writes in the bitmap"))
            .arg(flag("disable", "Stop recording writes"))
            .arg(
                Arg::new("merge")
                    .long("merge")
                    .value_name("SOURCE")
                    .action(ArgAction::Append)
                    .help("Also mark what the bitmap SOURCE has marked; repeatable"),
            )
            .next_help_heading(None)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Changes::augment_args(command)
    }
}

impl FromArgMatches for Changes {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Changes, clap::Error> {
        let mut changes = Vec::new();
        for name in CHANGES {
            let indices = matches.indices_of(name).into_iter().flatten();
            let values = matches.get_many::<String>(name).into_iter().flatten();
            for (index, value) in indices.zip(values) {
                let change = match name {
                    "add" => BitmapChange::Add,
                    "remove" => BitmapChange::Remove,
                    "clear" => BitmapChange::Clear,
                    "enable" => BitmapChange::Enable,
                    "disable" => BitmapChange::Disable,
                    _ => BitmapChange::Merge(value.clone()),
                };
                changes.push((index, change));
            }
        }
        changes.sort_by_key(|(index, _)| *index);
        let changes = changes.into_iter().map(|(_, change)| change);
        Ok(Changes(changes.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Changes::from_arg_matches(matches)?;
        Ok(())
    }
}

pub(super) fn run(args: BitmapArgs) -> anyhow::Result<()> {
    let Some(name) = &args.bitmap else {
        return list(&args);
    };
    if args.changes.0.is_empty() {
        let all = CHANGES.map(|name| format!("--{name}")).join(", ");
        bail!("no action given; add one of {all} or --list");
    }
    let options = BitmapOptions {
        format: args.image.format,
        granularity: args.granularity,
        source: args.source_file,
        source_format: args.source_format,
        dir: args.bitmaps,
    };
    Ok(img::bitmap(
        &args.image.file,
        name,
        &args.changes.0,
        &options,
    )?)
}

fn list(args: &BitmapArgs) -> anyhow::Result<()> {
    let (format, dir) = (args.image.format, args.bitmaps.as_deref());
    let mut problems = Vec::new();
    let mut tell = |problem: &str| problems.push(problem.to_owned());
    let bitmaps = img::bitmaps(&args.image.file, format, dir, args.force_share, &mut tell)?;
    if args.json || args.output == Output::Json {
        let all: Vec<_> = bitmaps.iter().map(to_json).collect();
        print_json(&all.into())?;
        return all_told(&problems);
    }
    let mut text = format!(
        "{:<12} {:<12} {:<12} NAME\n",
        "GRANULARITY", "DIRTY", "FLAGS"
    );
    for bitmap in &bitmaps {
        let granularity = Size(bitmap.granularity()).to_string();
        let dirty = bitmap
            .dirty()
            .map_or("?".to_owned(), |n| Size(n).to_string());
        let flags = bitmap.flags().join(",");
        let name = bitmap.name();
        let problem = bitmap
            .problem()
            .map_or(String::new(), |why| format!(": {}", img::shown(why)));
        text += &format!("{granularity:<12} {dirty:<12} {flags:<12} {name}{problem}\n");
    }
    print(text)?;
    all_told(&problems)
}

fn all_told(problems: &[String]) -> anyhow::Result<()> {
    match problems {
        [] => Ok(()),
        problems => bail!("some bitmaps cannot be read: {}", problems.join("; ")),
    }
}

/// Returns a bitmap with QEMU's names for its fields.
fn to_json(listed: &Listed) -> Value {
    match listed {
        Listed::Own(own) => own.to_json(),
        Listed::Beside(status) => json!({
            "name": status.name,
            "granularity": status.granularity,
            "flags": listed.flags(),
            "count": status.dirty,
            "problem": status.problem,
        }),
    }
}
