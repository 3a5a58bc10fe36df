//! `fathom img convert`

use super::common::{RateArg, ReadArgs};
use super::image_opts::{ImageOptsArg, target};
use super::watch::watched;
use super::{format_options, parse_cache, parse_format, set_backing};
use crate::aio::AioArg;
use anyhow::bail;
use clap::Args;
use fathom_img::{
    self as img, Broken, ConvertOptions, CreateOptions, Format, OpenOptions, SnapshotName, Source,
    TargetOptions,
};
use fathom_storage::Cache;
use fathom_units::parse_size;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Copy an image into another one, of any format
#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// Format of the sources; by default what each looks like
    #[arg(short = 'f', long, value_parser = parse_format, value_name = "FORMAT")]
    source_format: Option<Format>,
    /// Format of the target
    #[arg(short = 'O', long, value_parser = parse_format, default_value = "raw", value_name = "FORMAT")]
    target_format: Format,
    /// Options of the target's format, or `help`
    #[arg(short = 'o', long = "target-options", value_name = "NAME=VALUE,...")]
    options: Vec<String>,
    /// Read the disk as an internal snapshot has kept it
    #[arg(short = 'l', long, value_name = "ID|NAME")]
    source_snapshot: Option<String>,
    /// Compress (qcow2 only)
    #[arg(short, long)]
    compress: bool,
    /// Backing file of the target, which holds what the source's backing files do: only what the
    /// source itself has is copied
    #[arg(short = 'B', long, value_name = "PATH")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT")]
    backing_format: Option<Format>,
    /// The target is there: write to it
    #[arg(short = 'n', long)]
    no_create: bool,
    /// With -n: the target reads as zeroes
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// So many zero bytes in a row are not written; 0: write all of them
    #[arg(short = 'S', long, value_parser = parse_size, default_value = "4k", value_name = "SIZE")]
    sparse_size: u64,
    /// How the sources are read: none, writeback or writethrough
    #[arg(short = 'T', long, default_value = "writeback", value_parser = parse_cache, value_name = "CACHE")]
    source_cache: Cache,
    /// How the target is written: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache, value_name = "CACHE")]
    target_cache: Cache,
    #[command(flatten)]
    aio: AioArg,
    #[command(flatten)]
    rate: RateArg,
    /// Requests at once
    #[arg(short = 'm', long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// Writing out of order is what is always done (for scripts written for qemu-img)
    #[arg(short = 'W', long, hide = true)]
    oob_writes: bool,
    /// Copying within the kernel is only faster (likewise)
    #[arg(short = 'C', long, hide = true)]
    copy_offloading: bool,
    /// Take zeroes for what cannot be read
    #[arg(long)]
    salvage: bool,
    /// The target is a named pipe or something else that is written from its first byte to its last only, as
    /// standard output always is (raw and qcow2)
    #[arg(long)]
    to_stream: bool,
    /// Copy persistent bitmaps, too (qcow2 only)
    #[arg(long)]
    bitmaps: bool,
    /// Leave out bitmaps that are broken
    #[arg(long, requires = "bitmaps")]
    skip_broken_bitmaps: bool,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    opts: ImageOptsArg,
    /// With -n: the target is told of by such options, too
    #[arg(long, requires = "no_create", conflicts_with = "target_format")]
    target_image_opts: bool,
    /// With -n: the target's external data file; an image alone cannot choose one
    #[arg(long, value_name = "FILE", requires = "no_create")]
    data_file: Option<PathBuf>,
    /// Images (files, rbd:POOL/IMAGE), NBD URIs or - for standard input (several are put one behind the
    /// other), then the target: a file, rbd:POOL/IMAGE, an NBD URI, or - for standard output
    #[arg(value_name = "SOURCE TARGET")]
    files: Vec<OsString>,
}

pub(super) fn run(mut args: ConvertArgs) -> anyhow::Result<()> {
    if let Some(text) = args.files.last_mut().filter(|_| args.target_image_opts) {
        (*text, args.target_format) = target(text)?;
    }
    let Some(create) = create_options(&args)? else {
        return Ok(());
    };
    let Some((target, sources)) = args.files.split_last().filter(|(_, rest)| !rest.is_empty())
    else {
        bail!("which file is to be made? Give a source and a target");
    };
    args.read.refuse_json_to(target)?;
    if args.no_create && (args.backing.is_some() || !args.options.is_empty()) {
        bail!("-n writes to a target as it is: no -o and no -B with it");
    }
    let options = ConvertOptions {
        target: TargetOptions {
            create,
            cache: args.target_cache,
            engine: args.aio.aio,
            no_create: args.no_create,
            target_is_zero: args.target_is_zero,
            compress: args.compress,
            sparse: args.sparse_size,
            allow_dirs: args.read.allow_dir.clone(),
            data_file: args.data_file.clone(),
            keys: args.read.keys.ring(),
        },
        rate: args.rate.rate,
        parallel: args.parallel.into(),
        salvage: args.salvage,
        bitmaps: args.bitmaps.then_some(match args.skip_broken_bitmaps {
            true => Broken::Skip,
            false => Broken::Refuse,
        }),
        part: None,
        to_stream: args.to_stream,
    };
    let sources: Result<Vec<_>, _> = sources.iter().map(|text| source(&args, text)).collect();
    let sources = sources?;
    watched(&args.read.watch, |progress| {
        img::convert(&sources, target, &options, progress)
    })
}

fn source(args: &ConvertArgs, text: &OsStr) -> anyhow::Result<Source> {
    args.opts
        .source(text, args.source_format, |format| OpenOptions {
            snapshot: args.source_snapshot.as_deref().map(SnapshotName::parse),
            ..args.read.open(format, args.source_cache, args.aio.aio)
        })
}

/// None: the user has asked what options there are.
fn create_options(args: &ConvertArgs) -> anyhow::Result<Option<CreateOptions>> {
    let Some(mut create) = format_options(args.target_format, &args.options)? else {
        return Ok(None);
    };
    set_backing(&mut create, args.backing.clone(), args.backing_format)?;
    Ok(Some(create))
}
