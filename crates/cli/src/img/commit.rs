//! `fathom img commit`: merges an image into its backing image.

use super::common::{DataFileArg, KeysArg, RateArg};
use super::image_opts::ImageArg;
use super::watch::{WatchArgs, watched};
use super::{parse_cache, print};
use clap::Args;
use fathom_img::{self as img, CommitOptions};
use fathom_storage::Cache;
use std::path::PathBuf;

/// Copy the data of an image into its backing image
#[derive(Debug, Args)]
pub(super) struct CommitArgs {
    /// Image of the backing chain to write to [default: the backing image]
    ///
    /// Implies --drop. A relative path is relative to the directory of the image above.
    #[arg(short, long, value_name = "PATH")]
    base: Option<PathBuf>,
    /// Do not empty the image, because it will be deleted
    #[arg(short, long)]
    drop: bool,
    #[command(flatten)]
    rate: RateArg,
    /// Page cache for the images: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,
    /// Directory with files that an image may name, in addition to its own; repeatable
    #[arg(long, value_name = "DIR")]
    allow_dir: Vec<PathBuf>,
    #[command(flatten)]
    data_file: DataFileArg,
    #[command(flatten)]
    keys: KeysArg,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    image: ImageArg,
}

pub(super) fn run(args: CommitArgs) -> anyhow::Result<()> {
    let options = CommitOptions {
        format: args.image.format,
        keep: args.drop || args.base.is_some(),
        base: args.base,
        rate: args.rate.rate,
        cache: args.cache,
        allow_dirs: args.allow_dir,
        data_file: args.data_file.data_file,
        keys: args.keys.and(args.image.keys).ring(),
    };
    watched(&args.watch, |progress| {
        img::commit(&args.image.file, &options, progress)
    })?;
    match args.watch.quiet() || args.watch.json() {
        true => Ok(()),
        false => print("Image committed.\n"),
    }
}
