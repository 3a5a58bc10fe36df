//! `fathom img restore`: restores an image from an archive.

use super::common::KeysArg;
use super::watch::{WatchArgs, watched};
use super::{format_options, parse_cache, parse_format};
use crate::aio::AioArg;
use clap::Args;
use fathom_img::{self as img, Format, TargetOptions};
use fathom_storage::Cache;
use fathom_units::parse_size;
use std::ffi::OsString;

/// Restore an image from an archive
#[derive(Debug, Args)]
pub(super) struct RestoreArgs {
    /// Format of the target, such as qcow2
    #[arg(short = 'O', long, value_parser = parse_format, default_value = "raw", value_name = "FORMAT")]
    target_format: Format,
    /// Options of the target's format; `-o help` lists them
    #[arg(short = 'o', long = "target-options", value_name = "NAME=VALUE,...")]
    options: Vec<String>,
    /// Write to an existing target
    #[arg(short = 'n', long, conflicts_with = "options")]
    no_create: bool,
    /// With --no-create: do not write zeroes, because the target reads as zeroes
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Number of zero bytes in a row that are not written; 0 writes all zeroes
    #[arg(short = 'S', long, value_parser = parse_size, default_value = "4k", value_name = "SIZE")]
    sparse_size: u64,
    /// Page cache for the target: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache, value_name = "CACHE")]
    target_cache: Cache,
    #[command(flatten)]
    aio: AioArg,
    #[command(flatten)]
    keys: KeysArg,
    #[command(flatten)]
    watch: WatchArgs,
    /// Manifest of the image: ARCHIVE/images/NAME.manifest
    ///
    /// ARCHIVE is a directory, s3://BUCKET/PREFIX, or a URL of a web server.
    #[arg(value_name = "MANIFEST")]
    manifest: String,
    /// Target: a file, a device, rbd:POOL/IMAGE, or with --no-create an NBD URI
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
