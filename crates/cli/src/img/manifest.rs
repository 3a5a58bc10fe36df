//! `fathom img manifest`: writes the hashes of an image to a manifest.

use super::archive::StripeArgs;
use super::common::ReadArgs;
use super::watch::watched_telling;
use super::{parse_cache, parse_format};
use crate::aio::AioArg;
use clap::Args;
use fathom_img::{self as img, Format, Source};
use fathom_storage::Cache;
use serde_json::json;
use std::ffi::OsString;
use std::path::PathBuf;

/// Write the hashes of an image to a manifest
///
/// A manifest lets `fathom serve --base-manifest` verify data from an untrusted server.
#[derive(Debug, Args)]
pub(super) struct ManifestArgs {
    /// Format of the image: raw, qcow2 or qed
    ///
    /// raw hashes the bytes of the file. The other formats hash the disk in the image.
    #[arg(short, long, value_parser = parse_format, default_value = "raw")]
    format: Format,
    #[command(flatten)]
    stripes: StripeArgs,
    /// Page cache for the image: none, writeback or writethrough
    #[arg(short = 'T', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,
    #[command(flatten)]
    aio: AioArg,
    #[command(flatten)]
    read: ReadArgs,
    /// Image: a file, a device, rbd:POOL/IMAGE, an NBD URI, or - for standard input
    #[arg(value_name = "IMAGE")]
    image: OsString,
    /// Manifest to create
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn run(args: &ManifestArgs) -> anyhow::Result<()> {
    let options = args.stripes.options()?;
    let open = args.read.open(Some(args.format), args.cache, args.aio.aio);
    let source = Source::new(&args.image, open)?;
    let manifest = watched_telling(
        &args.read.watch,
        |progress| img::manifest(&source, &args.file, &options, progress),
        |manifest| {
            let stripes = manifest.stripes();
            json!({
                "size": manifest.size(),
                "stripes": stripes.len(),
                "data-stripes": stripes.iter().flatten().count(),
            })
        },
    );
    manifest.map(drop)
}
