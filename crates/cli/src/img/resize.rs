//! `fathom img resize`: changes the size of an image.

use super::common::{DataFileArg, KeysArg};
use super::image_opts::ImageArg;
use super::{print, print_json};
use clap::{Args, ValueEnum};
use fathom_img::{self as img, Preallocation, ResizeOptions};
use fathom_units::NewSize;
use serde_json::json;
use std::path::PathBuf;

/// Change the size of an image's disk
#[derive(Debug, Args)]
pub(super) struct ResizeArgs {
    /// Allocation of the new part of the disk
    #[arg(long, value_enum, default_value = "off", value_name = "MODE")]
    preallocation: Mode,
    /// Allow a smaller size; data behind the new end is lost
    #[arg(long)]
    shrink: bool,
    /// Directory with backing files that the image may name, in addition to its own; repeatable
    #[arg(long, value_name = "DIR")]
    allow_dir: Vec<PathBuf>,
    #[command(flatten)]
    data_file: DataFileArg,
    #[command(flatten)]
    keys: KeysArg,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Print the old and the new size as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageArg,
    /// New size, such as 20G, or a difference, such as +1G or -1G
    #[arg(value_parser = NewSize::parse, allow_hyphen_values = true, value_name = "[+|-]SIZE")]
    size: NewSize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// No allocation
    Off,
    /// Allocate tables
    Metadata,
    /// Allocate space with fallocate(2)
    Falloc,
    /// Allocate space by writing zeroes
    Full,
}

pub(super) fn run(args: ResizeArgs) -> anyhow::Result<()> {
    let options = ResizeOptions {
        size: args.size,
        preallocation: match args.preallocation {
            Mode::Off => Preallocation::Off,
            Mode::Metadata => Preallocation::Metadata,
            Mode::Falloc => Preallocation::Falloc,
            Mode::Full => Preallocation::Full,
        },
        shrink: args.shrink,
        allow_dirs: args.allow_dir,
        data_file: args.data_file.data_file,
        keys: args.keys.and(args.image.keys).ring(),
    };
    let done = img::resize(&args.image.file, args.image.format, &options)?;
    if args.json {
        return print_json(&json!({
            "filename": args.image.file.to_string(),
            "format": done.format.name(),
            "old-virtual-size": done.old,
            "virtual-size": done.new,
        }));
    }
    match args.quiet {
        true => Ok(()),
        false => print("Image resized.\n"),
    }
}
