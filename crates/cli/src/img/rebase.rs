//! `fathom img rebase`: changes the backing image of an image.

use super::common::{DataFileArg, KeysArg};
use super::image_opts::ImageArg;
use super::watch::{WatchArgs, watched};
use super::{parse_cache, parse_format};
use clap::Args;
use fathom_img::{self as img, Format, RebaseOptions};
use fathom_storage::Cache;
use std::path::PathBuf;

/// Change or remove the backing image of an image
///
/// The command copies data into the image where the backing images differ, so that the disk stays
/// the same. With --backing-unsafe it changes only the name.
#[derive(Debug, Args)]
pub(super) struct RebaseArgs {
    /// New backing image, or "" for none
    ///
    /// The image contains the path as given: an absolute path, or relative to the directory of the
    /// image.
    #[arg(short, long, value_name = "PATH")]
    backing: String,
    /// Format of the new backing image
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT")]
    backing_format: Option<Format>,
    /// Change only the name of the backing image, and copy nothing
    #[arg(short = 'u', long)]
    backing_unsafe: bool,
    /// Compress copied data (qcow2 only)
    #[arg(short, long)]
    compress: bool,
    /// Page cache for the image: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,
    /// Page cache for the new backing image: none, writeback or writethrough
    #[arg(short = 'T', long, default_value = "writeback", value_parser = parse_cache, value_name = "CACHE")]
    backing_cache: Cache,
    /// Read backing images even if other processes write to them
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Directory with files that images may name, in addition to their own; repeatable
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

pub(super) fn run(args: RebaseArgs) -> anyhow::Result<()> {
    let backing = (!args.backing.is_empty()).then_some((args.backing, args.backing_format));
    let options = RebaseOptions {
        format: args.image.format,
        backing,
        only_name: args.backing_unsafe,
        compress: args.compress,
        cache: args.cache,
        backing_cache: args.backing_cache,
        force_share: args.force_share,
        allow_dirs: args.allow_dir,
        data_file: args.data_file.data_file,
        keys: args.keys.and(args.image.keys).ring(),
    };
    watched(&args.watch, |progress| {
        img::rebase(&args.image.file, &options, progress)
    })
}
