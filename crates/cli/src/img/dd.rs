//! `fathom img dd`: copies a part of an image.

use super::common::ReadArgs;
use super::image_opts::ImageOptsArg;
use super::{format_options, parse_format};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use fathom_img::{self as img, ConvertOptions, Format, TargetOptions};
use fathom_storage::{Cache, EngineKind};
use fathom_units::parse_size;
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

/// Copy a part of a disk into a new image
#[derive(Debug, Args)]
pub(super) struct DdArgs {
    /// Format of the source, such as qcow2 [default: detected]
    #[arg(short = 'f', long, value_parser = parse_format, value_name = "FORMAT")]
    source_format: Option<Format>,
    /// Format of the target, such as qcow2
    #[arg(short = 'O', long, value_parser = parse_format, default_value = "raw", value_name = "FORMAT")]
    target_format: Format,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    opts: ImageOptsArg,
    /// if=SOURCE of=TARGET, and bs=SIZE, skip=BLOCKS or count=BLOCKS
    ///
    /// SOURCE and TARGET are as for convert; - is standard input or standard output. bs is the size
    /// of a block in bytes [default: 512]. skip is the number of blocks to skip at the beginning of
    /// the source. count is the maximum number of blocks to copy.
    #[arg(value_name = "NAME=VALUE", required = true)]
    operands: Vec<OsString>,
}

/// The operands of the command line.
#[derive(Default)]
struct Operands<'a> {
    source: Option<&'a OsStr>,
    target: Option<&'a OsStr>,
    block: Option<u64>,
    skip: Option<u64>,
    count: Option<u64>,
}

const SECTOR: u64 = 512;

impl<'a> Operands<'a> {
    fn parse(texts: &'a [OsString]) -> anyhow::Result<Operands<'a>> {
        let mut operands = Operands::default();
        for text in texts {
            let shown = text.to_string_lossy();
            let bytes = text.as_bytes();
            let at = bytes.iter().position(|byte| *byte == b'=');
            let at = at.with_context(|| {
                format!("'{shown}' is not an operand; operands are if=, of=, bs=, skip= and count=")
            })?;
            let value = OsStr::from_bytes(&bytes[at + 1..]);
            let number = || {
                let read = parse_size(&value.to_string_lossy());
                read.map(Some).map_err(|error| anyhow!("{shown}: {error}"))
            };
            match &bytes[..at] {
                b"if" => operands.source = Some(value),
                b"of" => operands.target = Some(value),
                b"bs" => operands.block = number()?,
                b"skip" => operands.skip = number()?,
                b"count" => operands.count = number()?,
                _ => bail!(
                    "'{shown}': unknown operand; operands are if=, of=, bs=, skip= and count="
                ),
            }
        }
        Ok(operands)
    }

    /// Returns the part of the source to copy, in bytes.
    fn part(&self) -> anyhow::Result<Range<u64>> {
        let block = self.block.unwrap_or(SECTOR);
        if block == 0 {
            bail!("bs=0: less than the minimum of 1 byte");
        }
        let bytes = |blocks: u64, name| {
            let bytes = blocks.checked_mul(block);
            let bytes = bytes
                .with_context(|| format!("{name}={blocks}: too many blocks of {block} bytes"))?;
            match bytes.is_multiple_of(SECTOR) {
                true => Ok(bytes),
                false => bail!(
                    "{name}={blocks}: with blocks of {block} bytes, not a multiple of {SECTOR} \
                     bytes"
                ),
            }
        };
        let start = self.skip.map_or(Ok(0), |skip| bytes(skip, "skip"))?;
        let len = self.count.map(|count| bytes(count, "count")).transpose()?;
        Ok(start..len.map_or(u64::MAX, |len| start.saturating_add(len)))
    }
}

pub(super) fn run(args: &DdArgs) -> anyhow::Result<()> {
    let operands = Operands::parse(&args.operands)?;
    let (Some(source), Some(target)) = (operands.source, operands.target) else {
        bail!("no source or no target given; write if=SOURCE of=TARGET");
    };
    args.read.refuse_json_to(target)?;
    let Some(create) = format_options(args.target_format, &[])? else {
        return Ok(());
    };
    let (cache, engine) = (Cache::Writeback, EngineKind::default());
    let options = ConvertOptions {
        target: TargetOptions {
            create,
            cache,
            engine,
            no_create: false,
            target_is_zero: false,
            compress: false,
            sparse: 4 << 10,
            allow_dirs: args.read.allow_dir.clone(),
            data_file: None,
            keys: args.read.keys.ring(),
        },
        rate: None,
        parallel: 16,
        salvage: false,
        bitmaps: None,
        part: Some(operands.part()?),
        to_stream: false,
    };
    let open = |format| args.read.open(format, cache, engine);
    let source = args.opts.source(source, args.source_format, open)?;
    super::watch::watched(&args.read.watch, |progress| {
        img::convert(&[source], target, &options, progress)
    })
}
