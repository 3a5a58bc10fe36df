//! `fathom img compare`: compares the contents of two images.

use super::common::ReadArgs;
use super::image_opts::ImageOptsArg;
use super::watch::{json_line, stop_flag};
use super::{parse_cache, parse_format};
use crate::aio::AioArg;
use clap::Args;
use fathom_img::{self as img, CompareOptions, Comparison, Error, Format, Progress};
use fathom_storage::Cache;
use serde_json::json;
use std::ffi::{OsStr, OsString};

/// Compare two disks
///
/// Exit status: 0 identical; 1 different; 2 an image cannot be opened; 4 an image cannot be read.
#[derive(Debug, Args)]
pub(super) struct CompareArgs {
    /// Format of the first image, such as qcow2 [default: detected]
    #[arg(short = 'f', long, value_parser = parse_format, value_name = "FORMAT")]
    a_format: Option<Format>,
    /// Format of the second image [default: detected]
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT")]
    b_format: Option<Format>,
    /// Also compare sizes and allocation
    #[arg(short, long)]
    strict: bool,
    /// Page cache for the images: none, writeback or writethrough
    #[arg(short = 'T', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,
    #[command(flatten)]
    aio: AioArg,
    #[command(flatten)]
    read: ReadArgs,
    #[command(flatten)]
    opts: ImageOptsArg,
    /// First image: a file, a device, rbd:POOL/IMAGE or an NBD URI
    #[arg(value_name = "FILE1")]
    a: OsString,
    /// Second image
    #[arg(value_name = "FILE2")]
    b: OsString,
}

const DIFFERENT: i32 = 1;
const NOT_OPENED: i32 = 2;
const NOT_READ: i32 = 4;
const INTERRUPTED: i32 = 130;

pub(super) fn run(args: CompareArgs) -> anyhow::Result<()> {
    let stop = stop_flag()?;
    let open = |format| args.read.open(format, args.cache, args.aio.aio);
    let source = |text: &OsStr, format| args.opts.source(text, format, open);
    let options = CompareOptions {
        strict: args.strict,
    };
    let mut watch = args.read.watch.watch();
    let mut watcher = |event| watch.event(event);
    let compared = source(&args.a, args.a_format).and_then(|a| {
        let b = source(&args.b, args.b_format)?;
        let mut progress = Progress::new(&mut watcher, &stop);
        Ok(img::compare([&a, &b], options, &mut progress)?)
    });
    watch.end();
    match compared {
        Ok(found) => tell(&args, found),
        Err(error) => {
            eprintln!("fathom: {}", img::shown(&error.to_string()));
            std::process::exit(match error.downcast_ref() {
                Some(Error::Interrupted) => INTERRUPTED,
                Some(Error::Data { .. }) => NOT_READ,
                _ => NOT_OPENED,
            });
        }
    }
}

fn tell(args: &CompareArgs, found: Comparison) -> anyhow::Result<()> {
    let (is_same, text) = match found {
        Comparison::Identical { .. } => (true, "Images are identical.".to_owned()),
        Comparison::Content { offset, .. } => {
            (false, format!("Content mismatch at offset {offset}!"))
        }
        Comparison::Sizes => (false, "Strict mode: Image size mismatch!".to_owned()),
        Comparison::Allocation { offset } => {
            let text = format!("Strict mode: Offset {offset} block status mismatch!");
            (false, text)
        }
    };
    let sizes_differ = matches!(
        found,
        Comparison::Sizes
            | Comparison::Identical { sizes_differ: true }
            | Comparison::Content {
                sizes_differ: true,
                ..
            }
    );
    if args.read.watch.json() {
        let offset = match found {
            Comparison::Content { offset, .. } | Comparison::Allocation { offset } => Some(offset),
            _ => None,
        };
        json_line(&json!({
            "event": "end",
            "identical": is_same,
            "sizes-differ": sizes_differ,
            "offset": offset,
            "message": text,
        }));
    } else if !args.read.watch.quiet() {
        // If the contents differ below the end of both disks, the sizes do not matter.
        let is_in_both = matches!(
            found,
            Comparison::Content {
                is_behind: false,
                ..
            }
        );
        if sizes_differ && !args.strict && !is_in_both {
            super::print("Warning: Image size mismatch!\n")?;
        }
        super::print(format_args!("{text}\n"))?;
    }
    match is_same {
        true => Ok(()),
        false => std::process::exit(DIFFERENT),
    }
}
