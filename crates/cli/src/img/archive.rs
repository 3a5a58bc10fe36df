//! `fathom img archive`, and the options for stripes.

use super::common::ReadArgs;
use super::watch::watched_telling;
use super::{parse_cache, parse_format, print, print_json};
use crate::aio::AioArg;
use anyhow::{Context, bail};
use clap::Args;
use fathom_img::{
    self as img, Archived, Format, ListedImage, OpenOptions, SnapshotName, Source, StripeOptions,
};
use fathom_storage::Cache;
use fathom_units::{Utc, parse_size, short_size};
use serde_json::{Value, json};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Options for stripes.
#[derive(Debug, Args)]
pub(super) struct StripeArgs {
    /// Size of a stripe, a power of two from 64k to 16M
    #[arg(long, value_parser = parse_stripe_size, default_value = "1M", value_name = "SIZE")]
    stripe_size: u32,
    /// File with the ranges that a boot reads first, in their order
    ///
    /// A line of the file is a range of the disk in bytes, `OFFSET LENGTH`. `fathom base profile`
    /// prints such a file.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Replace an existing image or manifest of this name
    #[arg(long)]
    force: bool,
}

impl StripeArgs {
    pub(super) fn options(&self) -> anyhow::Result<StripeOptions> {
        let stripe_size = self.stripe_size;
        let profile = self
            .profile
            .as_ref()
            .map(|path| read_profile(path, stripe_size));
        Ok(StripeOptions {
            stripe_size,
            profile: profile.transpose()?.unwrap_or_default(),
            force: self.force,
            verify_known: false,
        })
    }
}

fn parse_stripe_size(text: &str) -> Result<u32, String> {
    let size = u32::try_from(parse_size(text)?).ok();
    let is_good = |size: &u32| size.is_power_of_two() && (64 << 10..=16 << 20).contains(size);
    size.filter(is_good)
        .ok_or_else(|| "not a power of two from 64k to 16M".into())
}

fn read_profile(path: &PathBuf, stripe_size: u32) -> anyhow::Result<Vec<u32>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("{shown}"))?;
    let stripes = fathom_archive::profile::parse(&text, stripe_size.into());
    stripes.map_err(|problem| anyhow::anyhow!("{shown}:{problem}"))
}

/// Store a disk in an archive, whose images share equal data
#[derive(Debug, Args)]
pub(super) struct ArchiveArgs {
    /// Format of the image, such as qcow2 [default: detected]
    #[arg(short, long, value_parser = parse_format)]
    format: Option<Format>,
    /// Internal snapshot to store [default: the disk]
    #[arg(short = 'l', long, value_name = "ID|NAME")]
    source_snapshot: Option<String>,
    #[command(flatten)]
    stripes: StripeArgs,
    /// Verify stripes that are already in the archive, and replace damaged ones
    #[arg(long)]
    verify_known: bool,
    /// Page cache for the image: none, writeback or writethrough
    #[arg(short = 'T', long, default_value = "writeback", value_parser = parse_cache)]
    cache: Cache,
    #[command(flatten)]
    aio: AioArg,
    #[command(flatten)]
    read: ReadArgs,
    /// List the images of an archive; with --json as one JSON array
    #[arg(long, conflicts_with_all = ["force", "profile", "source_snapshot", "verify_known"])]
    list: bool,
    /// Image, archive, and the image's name in the archive; with --list only the archive
    ///
    /// The image is a file, a device, rbd:POOL/IMAGE, an NBD URI, or - for standard input. The
    /// archive is a directory or s3://BUCKET/PREFIX.
    #[arg(value_name = "IMAGE ARCHIVE NAME", required = true)]
    words: Vec<OsString>,
}

pub(super) fn run(args: &ArchiveArgs) -> anyhow::Result<()> {
    match (&args.words[..], args.list) {
        ([archive], true) => list(text(archive)?, args.read.watch.json()),
        ([image, archive, name], false) => keep(args, image, text(archive)?, text(name)?),
        (_, true) => bail!("--list: name only the archive"),
        (_, false) => bail!("name an image, an archive, and the image's name in the archive"),
    }
}

/// Returns an argument as a string. Names of objects are UTF-8.
fn text(word: &OsStr) -> anyhow::Result<&str> {
    let text = word.to_str();
    text.with_context(|| format!("{}: not UTF-8", word.display()))
}

fn keep(args: &ArchiveArgs, image: &OsStr, archive: &str, name: &str) -> anyhow::Result<()> {
    let options = StripeOptions {
        verify_known: args.verify_known,
        ..args.stripes.options()?
    };
    let source = Source::new(
        image,
        OpenOptions {
            snapshot: args.source_snapshot.as_deref().map(SnapshotName::parse),
            ..args.read.open(args.format, args.cache, args.aio.aio)
        },
    )?;
    let watch = &args.read.watch;
    let archived = watched_telling(
        watch,
        |progress| img::archive(&source, archive, name, &options, progress),
        told,
    )?;
    match watch.quiet() || watch.json() {
        true => Ok(()),
        false => print(summary(&archived)),
    }
}

fn told(archived: &Archived) -> Value {
    json!({
        "manifest": archived.manifest,
        "size": archived.size,
        "read": archived.read,
        "new-stripes": archived.new,
        "known-stripes": archived.known,
        "repaired-stripes": archived.repaired,
        "zero-stripes": archived.zero,
        "stored": archived.stored,
    })
}

fn summary(archived: &Archived) -> String {
    let Archived {
        manifest,
        size,
        read,
        new,
        known,
        repaired,
        zero,
        stored,
    } = archived;
    let repaired = match repaired {
        0 => String::new(),
        count => format!(" ({count} of them replace damaged ones)"),
    };
    let manifest = img::shown(manifest);
    format!(
        "{manifest}\n\
         disk: {size} bytes, {read} of them read\n\
         stripes: {new} new{repaired}, {known} known, {zero} zero\n\
         stored: {stored} bytes\n"
    )
}

fn list(archive: &str, as_json: bool) -> anyhow::Result<()> {
    let images = img::archived(archive)?;
    if as_json {
        return print_json(&images.iter().map(listed_json).collect());
    }
    let width = images.iter().map(|image| image.name.len()).max();
    let width = width.unwrap_or(0).max("NAME".len());
    let mut text = format!(
        "{:width$}  {:>9}  {:>9}  {:>9}  {:>6}  MADE\n",
        "NAME", "SIZE", "STRIPES", "WITH DATA", "OF"
    );
    for image in &images {
        let name = img::shown(&image.name);
        text += &match &image.summary {
            Ok(is) => format!(
                "{name:width$}  {:>9}  {:>9}  {:>9}  {:>6}  {}\n",
                short_size(is.size),
                is.stripes,
                is.data,
                short_size(is.stripe_size.into()),
                Utc::from_seconds(is.made),
            ),
            Err(error) => format!("{name:width$}  {}\n", img::shown(&error.to_string())),
        };
    }
    print(text)
}

fn listed_json(image: &ListedImage) -> Value {
    match &image.summary {
        Ok(is) => json!({
            "name": image.name,
            "size": is.size,
            "stripe-size": is.stripe_size,
            "stripes": is.stripes,
            "data-stripes": is.data,
            "made": is.made,
        }),
        Err(error) => json!({"name": image.name, "error": error.to_string()}),
    }
}
