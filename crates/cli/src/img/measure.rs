//! `fathom img measure`: calculates the size of a new image.

use super::common::LookIntoArgs;
use super::image_opts::MaybeImageArg;
use super::{format_options, parse_format, print, print_json};
use anyhow::bail;
use clap::Args;
use fathom_img::{self as img, Format, MapOptions, SnapshotName};
use fathom_units::parse_size;

/// Compute the size of a new image's file
#[derive(Debug, Args)]
pub(super) struct MeasureArgs {
    /// Format of the new image, such as qcow2
    #[arg(short = 'O', long, visible_alias = "target-format", default_value = "raw", value_parser = parse_format, value_name = "FORMAT")]
    output_format: Format,
    /// Options of the format, as for `fathom img create`; `-o help` lists them
    #[arg(
        short,
        long = "option",
        visible_alias = "options",
        value_name = "NAME=VALUE,..."
    )]
    options: Vec<String>,
    /// Measure an empty disk of this size instead of an image
    #[arg(short, long, value_parser = parse_size)]
    size: Option<u64>,
    /// Measure the disk of this internal snapshot, by its ID or name
    #[arg(short = 'l', long, value_name = "SNAPSHOT", requires = "file")]
    snapshot: Option<String>,
    #[command(flatten)]
    into: LookIntoArgs,
    #[command(flatten)]
    image: MaybeImageArg,
}

pub(super) fn run(args: MeasureArgs) -> anyhow::Result<()> {
    let Some(target) = format_options(args.output_format, &args.options)? else {
        return Ok(());
    };
    let json = args.into.deep.look.json();
    let measure = match (args.image.file, args.size.or(target.size)) {
        (Some(_), Some(_)) if args.size.is_some() => {
            bail!("an image and --size are both given; give one of the two")
        }
        (Some(file), _) => {
            let source = MapOptions {
                format: args.image.format,
                force_share: args.into.deep.look.force_share,
                allow_dirs: args.into.deep.allow_dirs,
                keys: args.into.keys.and(args.image.keys).ring(),
                snapshot: args.snapshot.as_deref().map(SnapshotName::parse),
                ..MapOptions::default()
            };
            img::measure(&file, &source, &target)?
        }
        (None, Some(size)) => img::measure_empty(size, &target)?,
        (None, None) => bail!("no image given; name one, or give --size"),
    };
    match json {
        true => print_json(&measure.to_json()),
        false => print(measure),
    }
}
