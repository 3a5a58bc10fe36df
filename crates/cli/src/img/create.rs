//! `fathom img create`

use super::common::KeysArg;
use super::{format_options, parse_format, print, print_json, set_backing};
use crate::disk_args::location_parser;
use anyhow::bail;
use clap::Args;
use fathom_img::{self as img, Format, InfoOptions};
use fathom_storage::Location;
use fathom_units::parse_size;

/// Make an image (what the file had in it is lost)
#[derive(Debug, Args)]
pub(super) struct CreateArgs {
    /// Format of the image
    #[arg(short, long, default_value = "raw", value_parser = parse_format)]
    format: Format,
    /// Backing file, as it is to be written in the image: absolute or seen from the image
    #[arg(short, long, value_name = "PATH")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_parser = parse_format, value_name = "FORMAT")]
    backing_format: Option<Format>,
    /// Options of the format, or `help`
    #[arg(
        short,
        long = "option",
        visible_alias = "options",
        value_name = "NAME=VALUE,..."
    )]
    options: Vec<String>,
    /// Do not look at the backing file, which may not even be there
    #[arg(short, long, visible_alias = "backing-unsafe")]
    unsafe_backing: bool,
    #[command(flatten)]
    keys: KeysArg,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON: the description of the image made
    #[arg(long)]
    json: bool,
    /// The image: a file or rbd:POOL/IMAGE
    #[arg(value_name = "FILE", value_parser = location_parser())]
    file: Option<Location>,
    /// Size of the disk; by default that of the backing file
    #[arg(value_parser = parse_size)]
    size: Option<u64>,
}

pub(super) fn run(args: CreateArgs) -> anyhow::Result<()> {
    let Some(mut options) = format_options(args.format, &args.options)? else {
        return Ok(());
    };
    let Some(file) = args.file else {
        bail!("a new image needs a name: FILE, behind the options");
    };
    if args.size.is_some() && options.size.is_some() {
        bail!("the size is given twice: as SIZE and by -o size");
    }
    options.size = args.size.or(options.size);
    set_backing(&mut options, args.backing, args.backing_format)?;
    let created = img::create(&file, &options, args.unsafe_backing, &args.keys.ring())?;
    options.size = Some(created.size);
    // (A new raw or LUKS image on a device is expected to read as anything.)
    if !created.reads_as_zeroes && args.format == Format::Qcow2 && !args.quiet {
        eprintln!(
            "fathom: {}: its disk reads as what the device held before, not as zeroes; \
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
