//! `fathom img amend`

use super::common::FormatArg;
use super::{asks_for_help, pairs, parse_cache, print_names};
use crate::disk_args::location_parser;
use anyhow::Context;
use clap::Args;
use fathom_img::{self as img, AMENDABLE, CreateOptions, Format};
use fathom_storage::{Cache, Location};
use fathom_units::parse_size;

/// Change options of a qcow2 image: its version, the width of its refcounts
#[derive(Debug, Args)]
pub(super) struct AmendArgs {
    #[command(flatten)]
    format: FormatArg,
    /// The options, or `help`: compat, lazy_refcounts, refcount_bits
    #[arg(short, long, value_name = "NAME=VALUE,...", required = true)]
    options: Vec<String>,
    /// Only tables are written, durably (for scripts written for qemu-img)
    #[arg(short = 't', long, hide = true, value_parser = parse_cache)]
    cache: Option<Cache>,
    /// There is never more to be printed (likewise)
    #[arg(short, long, hide = true)]
    quiet: bool,
    /// It does not take long (likewise)
    #[arg(short, long, hide = true)]
    progress: bool,
    /// The image: a file or rbd:POOL/IMAGE
    #[arg(value_name = "FILE", value_parser = location_parser())]
    file: Option<Location>,
}

pub(super) fn run(args: &AmendArgs) -> anyhow::Result<()> {
    let mut options = CreateOptions::new(Format::Qcow2);
    for (name, value) in args.options.iter().flat_map(|text| pairs(text)) {
        if asks_for_help(&name) {
            return print_names(AMENDABLE);
        }
        options.set(&name, &value, parse_size)?;
    }
    let file = args.file.as_ref().context("which image? Give its FILE")?;
    Ok(img::amend(file, args.format.format, &options)?)
}
