//! `fathom img manifest`

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

/// Write down the hashes of an image's bytes, for who reads it from a server
#[derive(Debug, Args)]
pub(super) struct ManifestArgs {
    /// Format of the image, whose disk is meant then; raw: its bytes, whatever they are
    #[arg(short, long, value_parser = parse_format, default_value = "raw")]
    format: Format,
    #[command(flatten)]
    stripes: StripeArgs,
    /// How the image is read: none, writeback or writethrough
    #[arg(short = 'T', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,
    #[command(flatten)]
    aio: AioArg,
    #[command(flatten)]
    read: ReadArgs,
    /// A file, rbd:POOL/IMAGE, an NBD URI or - for standard input
    #[arg(value_name = "IMAGE")]
    image: OsString,
    /// Where the manifest goes
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
