//! `fathom img restore`

use super::common::KeysArg;
use super::watch::{WatchArgs, watched};
use super::{format_options, parse_cache, parse_format};
use crate::aio::AioArg;
use clap::Args;
use fathom_img::{self as img, Format, TargetOptions};
use fathom_storage::Cache;
use fathom_units::parse_size;
use std::ffi::OsString;

/// Make an image of one in an archive
#[derive(Debug, Args)]
pub(super) struct RestoreArgs {
    /// Format of the target
    #[arg(short = 'O', long, value_parser = parse_format, default_value = "raw", value_name = "FORMAT")]
    target_format: Format,
    /// Options of the target's format, or `help`
    #[arg(short = 'o', long = "target-options", value_name = "NAME=VALUE,...")]
    options: Vec<String>,
    /// The target is there: write to it
    #[arg(short = 'n', long, conflicts_with = "options")]
    no_create: bool,
    /// With -n: the target reads as zeroes
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// So many zero bytes in a row are not written; 0: write all of them
    #[arg(short = 'S', long, value_parser = parse_size, default_value = "4k", value_name = "SIZE")]
    sparse_size: u64,
    /// How the target is written: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache, value_name = "CACHE")]
    target_cache: Cache,
    #[command(flatten)]
    aio: AioArg,
    #[command(flatten)]
    keys: KeysArg,
    #[command(flatten)]
    watch: WatchArgs,
    /// The image's manifest: ARCHIVE/images/NAME.manifest, where ARCHIVE is a directory, s3://BUCKET/PREFIX or
    /// the URL of a web server
    #[arg(value_name = "MANIFEST")]
    manifest: String,
    /// A file, rbd:POOL/IMAGE, or (with -n) an NBD URI
    #[arg(value_name = "TARGET")]
    target: OsString,
}

pub(super) fn run(args: &RestoreArgs) -> anyhow::Result<()> {
    let Some(create) = format_options(args.target_format, &args.options)? else {
        return Ok(());
    };
    let options = TargetOptions {
        create,
        cache: args.target_cache,
        engine: args.aio.aio,
        no_create: args.no_create,
        target_is_zero: args.target_is_zero,
        compress: false,
        sparse: args.sparse_size,
        allow_dirs: Vec::new(),
        data_file: None,
        keys: args.keys.ring(),
    };
    watched(&args.watch, |progress| {
        img::restore(&args.manifest, &args.target, &options, progress)
    })
}
