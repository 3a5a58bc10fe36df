//! `fathom img rebase`

use super::common::{DataFileArg, KeysArg};
use super::image_opts::ImageArg;
use super::watch::{WatchArgs, watched};
use super::{parse_cache, parse_format};
use clap::Args;
use fathom_img::{self as img, Format, RebaseOptions};
use fathom_storage::Cache;
use std::path::PathBuf;

/// Give an image another backing file; its disk stays what it is, unless -u
#[derive(Debug, Args)]
pub(super) struct RebaseArgs {
    /// The backing file, as it is to be written in the image: absolute or seen from the image;
    /// "" for none
    #[arg(short, long, value_name = "PATH")]
    backing: String,
    /// Format of the backing file
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT")]
    backing_format: Option<Format>,
    /// Change the name only: the disk is as the new backing file makes it
    #[arg(short = 'u', long)]
    backing_unsafe: bool,
    /// Compress what is copied (qcow2 only)
    #[arg(short, long)]
    compress: bool,
    /// How the image is written: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,
    /// How the new backing file is read
    #[arg(short = 'T', long, default_value = "writeback", value_parser = parse_cache, value_name = "CACHE")]
    backing_cache: Cache,
    /// Read backing files even though other processes write to them
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Directory in which images may name their files now, besides their own
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
