//! `fathom img create`: creates an image.

use super::common::KeysArg;
use super::{format_options, parse_format, print, print_json, set_backing};
use crate::location_arg::location_parser;
use anyhow::bail;
use clap::Args;
use fathom_img::{self as img, Format, InfoOptions};
use fathom_storage::Location;
use fathom_units::parse_size;

/// Create an image
///
/// The contents of an existing file are lost.
#[derive(Debug, Args)]
pub(super) struct CreateArgs {
    /// Format of the image, such as qcow2
    #[arg(short, long, default_value = "raw", value_parser = parse_format)]
    format: Format,
    /// Backing image, such as base.qcow2
    ///
    /// The image contains the path as given: an absolute path, or relative to the directory of the
    /// image.
    #[arg(short, long, value_name = "PATH")]
    backing: Option<String>,
    /// Format of the backing image
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT")]
    backing_format: Option<Format>,
    /// Options of the format, such as cluster_size=1M; `-o help` lists them
    #[arg(
        short,
        long = "option",
        visible_alias = "options",
        value_name = "NAME=VALUE,..."
    )]
    options: Vec<String>,
    /// Do not open the backing image, which need not exist
    #[arg(short, long, visible_alias = "backing-unsafe")]
    unsafe_backing: bool,
    #[command(flatten)]
    keys: KeysArg,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Print the description of the image as JSON
    #[arg(long)]
    json: bool,
    /// Image to create: a file, a device or rbd:POOL/IMAGE
    #[arg(value_name = "FILE", value_parser = location_parser())]
    file: Option<Location>,
    /// Size of the disk, such as 20G [default: the size of the backing image]
    #[arg(value_parser = parse_size)]
    size: Option<u64>,
}

pub(super) fn run(args: CreateArgs) -> anyhow::Result<()> {
    let Some(mut options) = format_options(args.format, &args.options)? else {
        return Ok(());
    };
    let Some(file) = args.file else {
        bail!("no name given for the new image; name its FILE after the options");
    };
    if args.size.is_some() && options.size.is_some() {
        bail!("the size is given twice, as SIZE and by -o size; omit one of the two");
    }
    options.size = args.size.or(options.size);
    set_backing(&mut options, args.backing, args.backing_format)?;
    let created = img::create(&file, &options, args.unsafe_backing, &args.keys.ring())?;
    options.size = Some(created.size);
    // No warning for raw and LUKS images: on a device, users expect arbitrary contents.
    if !created.reads_as_zeroes && args.format == Format::Qcow2 && !args.quiet {
        eprintln!(
            "fathom: {}: the disk reads as the device's old contents, not as zeroes; \
             preallocation=full writes zeroes",
            img::shown(&options.qcow2.data_file.clone().unwrap_or(file.to_string()))
        );
    }
    if args.json {
        let options = InfoOptions {
            format: Some(args.format),
            ..InfoOptions::default()
        };
        for info in img::info(&file, &options)? {
            print_json(&info.to_json())?;
        }
    } else if !args.quiet {
        print(format_args!("Formatting '{}', {options}\n", file))?;
    }
    Ok(())
}
