//! `fathom img amend`: changes options and keys of an image.

use super::common::KeysArg;
use super::image_opts::MaybeImageArg;
use super::option_help::print_options;
use super::{asks_for_help, pairs, parse_cache, print};
use anyhow::{Context, bail};
use clap::Args;
use fathom_img::{self as img, AMENDABLE, CreateOptions, Format, KeyChanges, Slot};
use fathom_stack::KeySource;
use fathom_storage::{Cache, Location};
use fathom_units::parse_size;
use std::time::Duration;

/// Change format options of a qcow2 image, or the keys of an encrypted image
#[derive(Debug, Args)]
pub(super) struct AmendArgs {
    /// Options to change: compat, lazy_refcounts, refcount_bits; `-o help` lists them
    #[arg(short, long, value_name = "NAME=VALUE,...", required_unless_present_any = ["add_keys", "remove_keys", "remove_slots"])]
    options: Vec<String>,
    /// Key to add, such as file:new.key; repeatable
    ///
    /// --key must name a key that already unlocks the image. Both options take the same sources.
    #[arg(long = "add-key", value_name = "SOURCE")]
    add_keys: Vec<KeySource>,
    /// Key to remove, after keys have been added; repeatable
    #[arg(long = "remove-key", value_name = "SOURCE")]
    remove_keys: Vec<KeySource>,
    /// Key to remove, by the number of its slot in `fathom img info`; repeatable
    #[arg(long = "remove-slot", value_name = "N")]
    remove_slots: Vec<u32>,
    /// Time to unlock the image with a new key, in milliseconds, 1 to 30000
    ///
    /// An attacker needs this time for each guess.
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=30_000))]
    iter_time: u32,
    #[command(flatten)]
    keys: KeysArg,
    /// Ignored, for scripts of qemu-img
    #[arg(short = 't', long, hide = true, value_parser = parse_cache)]
    cache: Option<Cache>,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Ignored, for scripts of qemu-img
    #[arg(short, long, hide = true)]
    progress: bool,
    #[command(flatten)]
    image: MaybeImageArg,
}

pub(super) fn run(mut args: AmendArgs) -> anyhow::Result<()> {
    let keys = std::mem::take(&mut args.image.keys);
    args.keys = args.keys.and(keys);
    let args = &args;
    let mut options = CreateOptions::new(Format::Qcow2);
    for (name, value) in args.options.iter().flat_map(|text| pairs(text)) {
        if asks_for_help(&name) {
            return print_options(Format::Qcow2, AMENDABLE);
        }
        options.set(&name, &value, parse_size)?;
    }
    let file = args.image.file.as_ref();
    let file = file.context("no image given; name its FILE")?;
    // All keys are read before anything is changed.
    let changes = key_changes(args)?;
    if !changes.add.is_empty() && changes.keys.is_empty() {
        bail!("--key is missing: the image must be unlocked with a present key to add another one");
    }
    if !args.options.is_empty() {
        img::amend(file, args.image.format, &options)?;
    }
    change_keys(args, file, &changes)
}

fn key_changes(args: &AmendArgs) -> anyhow::Result<KeyChanges> {
    let read = |keys: &[KeySource]| -> anyhow::Result<Vec<_>> {
        let read = keys.iter().map(KeySource::read).collect::<Result<_, _>>();
        read.map_err(anyhow::Error::msg)
    };
    Ok(KeyChanges {
        keys: args.keys.ring().keys().map_err(anyhow::Error::msg)?,
        add: read(&args.add_keys)?,
        iter_time: Duration::from_millis(args.iter_time.into()),
        remove: { read(&args.remove_keys)?.into_iter().map(Slot::Of) }
            .chain(args.remove_slots.iter().copied().map(Slot::Number))
            .collect(),
    })
}

fn change_keys(args: &AmendArgs, file: &Location, changes: &KeyChanges) -> anyhow::Result<()> {
    if changes.add.is_empty() && changes.remove.is_empty() {
        return Ok(());
    }
    img::change_keys(file, args.image.format, changes, |what, slot| {
        if !args.quiet {
            // The change is complete even if this line cannot be printed.
            let _ = print(format_args!("Key slot {slot} {what}.\n"));
        }
    })?;
    Ok(())
}
