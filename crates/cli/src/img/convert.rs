//! `fathom img convert`: copies images to another format.

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

/// Copy an image to a new image, in any format
#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// Sources, then the target: files, devices, rbd:POOL/IMAGE, NBD URIs or -
    ///
    /// The name - means standard input or standard output. The target gets the concatenated data of
    /// several sources. A target on an NBD server needs --no-create.
    #[arg(value_name = "SOURCE TARGET")]
    files: Vec<OsString>,

    /// Format of the sources, such as qcow2 [default: detected]
    #[arg(short = 'f', long, value_parser = parse_format, value_name = "FORMAT", help_heading = "Source")]
    source_format: Option<Format>,
    /// Internal snapshot to copy [default: the disk]
    #[arg(short = 'l', long, value_name = "ID|NAME", help_heading = "Source")]
    source_snapshot: Option<String>,
    /// Write zeroes for data that cannot be read
    ///
    /// The command prints a line for each unreadable range.
    #[arg(long, help_heading = "Source")]
    salvage: bool,

    /// Format of the target, such as qcow2
    #[arg(short = 'O', long, value_parser = parse_format, default_value = "raw", value_name = "FORMAT",
          help_heading = "Target")]
    target_format: Format,
    /// Options of the target's format; `-o help` lists them
    #[arg(
        short = 'o',
        long = "target-options",
        value_name = "NAME=VALUE,...",
        help_heading = "Target"
    )]
    options: Vec<String>,
    /// Compress the target (qcow2 only)
    #[arg(short, long, help_heading = "Target")]
    compress: bool,
    /// Backing image of the target
    ///
    /// Only the data of the source itself is copied. The data of the source's backing images must
    /// be in this image.
    #[arg(short = 'B', long, value_name = "PATH", help_heading = "Target")]
    backing: Option<String>,
    /// Format of the backing image
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT", help_heading = "Target")]
    backing_format: Option<Format>,
    /// Also copy persistent bitmaps (qcow2 only)
    #[arg(long, help_heading = "Target")]
    bitmaps: bool,
    /// Omit broken bitmaps
    #[arg(long, requires = "bitmaps", help_heading = "Target")]
    skip_broken_bitmaps: bool,
    /// Number of zero bytes in a row that are not written; 0 writes all zeroes
    #[arg(short = 'S', long, value_parser = parse_size, default_value = "4k", value_name = "SIZE",
          help_heading = "Target")]
    sparse_size: u64,
    /// Write the target from its first byte to its last (raw and qcow2)
    ///
    /// For named pipes and other files that cannot seek. Standard output is always written in this
    /// way.
    #[arg(long, help_heading = "Target")]
    to_stream: bool,
    /// Write to an existing target
    #[arg(short = 'n', long, help_heading = "Target")]
    no_create: bool,
    /// With --no-create: do not write zeroes, because the target reads as zeroes
    #[arg(long, requires = "no_create", help_heading = "Target")]
    target_is_zero: bool,
    /// With --no-create: the target is options of QEMU, as with --image-opts
    #[arg(
        long,
        requires = "no_create",
        conflicts_with = "target_format",
        help_heading = "Target"
    )]
    target_image_opts: bool,
    /// With --no-create: external data file of the target, to be written
    ///
    /// The command writes to an external data file only if this option names it.
    #[arg(
        long,
        value_name = "FILE",
        requires = "no_create",
        help_heading = "Target"
    )]
    data_file: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Images")]
    opts: ImageOptsArg,
    #[command(flatten, next_help_heading = "Images")]
    read: ReadArgs,

    /// Page cache for the sources: none, writeback or writethrough
    #[arg(short = 'T', long, default_value = "writeback", value_parser = parse_cache, value_name = "CACHE",
          help_heading = "I/O")]
    source_cache: Cache,
    /// Page cache for the target: none, writeback or writethrough
    #[arg(short = 't', long, default_value = "writeback", value_parser = parse_cache, value_name = "CACHE",
          help_heading = "I/O")]
    target_cache: Cache,
    #[command(flatten, next_help_heading = "I/O")]
    aio: AioArg,
    #[command(flatten, next_help_heading = "I/O")]
    rate: RateArg,
    /// Maximum number of requests in flight, 1 to 64
    #[arg(short = 'm', long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=64), help_heading = "I/O")]
    parallel: u16,

    /// Ignored, for scripts of qemu-img
    #[arg(short = 'W', long, hide = true)]
    oob_writes: bool,
    /// Ignored, for scripts of qemu-img
    #[arg(short = 'C', long, hide = true)]
    copy_offloading: bool,
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
        bail!("no target given; name a source and a target");
    };
    args.read.refuse_json_to(target)?;
    if args.no_create && (args.backing.is_some() || !args.options.is_empty()) {
        bail!("-n writes to an existing target; omit -o and -B");
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

/// Returns the options of the new image, or `None` after `-o help`, which prints the options.
fn create_options(args: &ConvertArgs) -> anyhow::Result<Option<CreateOptions>> {
    let Some(mut create) = format_options(args.target_format, &args.options)? else {
        return Ok(None);
    };
    set_backing(&mut create, args.backing.clone(), args.backing_format)?;
    Ok(Some(create))
}
