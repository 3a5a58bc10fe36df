//! `fathom img map`: prints the extents of an image.

use super::common::LookIntoArgs;
use super::image_opts::ImageArg;
use anyhow::bail;
use clap::Args;
use fathom_img::{self as img, MapExtent, MapOptions};
use fathom_units::parse_size;
use std::io::Write;
use std::path::Path;

/// Show which file and offset contain each part of a disk
#[derive(Debug, Args)]
pub(super) struct MapArgs {
    /// Start of the part of the disk to show, such as 1G
    #[arg(short, long, default_value = "0", value_parser = parse_size, value_name = "OFFSET")]
    start_offset: u64,
    /// Length of the part of the disk to show [default: up to the end]
    #[arg(short = 'l', long, value_parser = parse_size, value_name = "LENGTH")]
    max_length: Option<u64>,
    #[command(flatten)]
    into: LookIntoArgs,
    #[command(flatten)]
    image: ImageArg,
}

pub(super) fn run(args: MapArgs) -> anyhow::Result<()> {
    let json = args.into.deep.look.json();
    let options = MapOptions {
        format: args.image.format,
        start: args.start_offset,
        max_len: args.max_length,
        force_share: args.into.deep.look.force_share,
        allow_dirs: args.into.deep.allow_dirs,
        keys: args.into.keys.and(args.image.keys).ring(),
        snapshot: None,
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    // The header is printed with the first extent, so that nothing is printed if opening fails.
    let mut before = match json {
        true => "[".to_owned(),
        false => format!("{:<16}{:<16}{:<16}File\n", "Offset", "Length", "Mapped to"),
    };
    let mut is_empty = true;
    img::map(&args.image.file, &options, |extent, path| {
        write!(out, "{before}")?;
        (before, is_empty) = (String::new(), false);
        match json {
            true => write!(out, "{}", JsonLine(extent))?,
            false => row(&mut out, extent, path)?,
        }
        if json {
            ",\n".clone_into(&mut before);
        }
        anyhow::Ok(())
    })?;
    if is_empty {
        write!(out, "{before}")?;
    }
    if json && is_empty {
        // qemu-img prints one empty extent for an empty map.
        let none = MapExtent {
            start: options.start,
            ..MapExtent::default()
        };
        write!(out, "{}", JsonLine(&none))?;
    }
    if json {
        writeln!(out, "]")?;
    }
    out.flush()?;
    Ok(())
}

/// Formats an extent as a line of the array that qemu-img prints.
struct JsonLine<'a>(&'a MapExtent);

impl std::fmt::Display for JsonLine<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let e = self.0;
        write!(
            f,
            "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \
             \"data\": {}, \"compressed\": {}",
            e.start, e.len, e.depth, e.present, e.zero, e.data, e.compressed
        )?;
        if let Some(host) = e.host {
            write!(f, ", \"offset\": {}", host.offset)?;
        }
        write!(f, "}}")
    }
}

/// Prints a line of the table. The table has only data, no zeroes.
fn row(out: &mut impl Write, extent: &MapExtent, path: Option<&Path>) -> anyhow::Result<()> {
    let host = match (extent.data, extent.host) {
        (false, _) => return Ok(()),
        (true, None) => bail!(
            "{:#x}: compressed, encrypted, or in an image of another program, so no offset in a \
             file exists; use --output json",
            extent.start
        ),
        (true, Some(host)) => host,
    };
    if !extent.zero {
        let file = img::shown(&path.unwrap_or(Path::new("")).to_string_lossy());
        let [start, len, at] = [extent.start, extent.len, host.offset].map(hex);
        writeln!(out, "{start:<16}{len:<16}{at:<16}{file}")?;
    }
    Ok(())
}

/// Formats a number like C's `%#x`.
fn hex(n: u64) -> String {
    match n {
        0 => "0".to_owned(),
        n => format!("{n:#x}"),
    }
}
