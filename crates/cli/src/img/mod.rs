//! `fathom img`: the image tool, with the options and the output of qemu-img. Each command has a
//! file.

mod amend;
mod archive;
mod bench;
mod bitmap;
mod check;
mod commit;
pub mod common;
mod compare;
mod convert;
mod create;
mod dd;
mod image_opts;
mod info;
mod json_name;
mod manifest;
mod map;
mod measure;
mod option_help;
mod rebase;
mod resize;
mod restore;
mod snapshot;
pub mod watch;

use anyhow::bail;
use clap::{Args, Subcommand, ValueEnum};
use fathom_img::{Backing, CreateOptions, Format};
use fathom_storage::Cache;
use fathom_units::parse_size;
use std::io::Write;

/// Create, describe, check, copy, compare and change images
#[derive(Debug, Args)]
// If an option is given twice, the last value counts, as with qemu-img.
#[command(args_override_self = true, version)]
pub struct ImgArgs {
    #[command(subcommand)]
    command: ImgCommand,
}

#[derive(Debug, Subcommand)]
enum ImgCommand {
    Create(create::CreateArgs),
    Amend(amend::AmendArgs),
    Commit(commit::CommitArgs),
    Compare(Box<compare::CompareArgs>),
    Convert(Box<convert::ConvertArgs>),
    Dd(Box<dd::DdArgs>),
    Info(info::InfoArgs),
    Check(check::CheckArgs),
    Map(map::MapArgs),
    Bitmap(bitmap::BitmapArgs),
    Measure(measure::MeasureArgs),
    Rebase(rebase::RebaseArgs),
    Resize(resize::ResizeArgs),
    Snapshot(snapshot::SnapshotArgs),
    Bench(bench::BenchArgs),
    Archive(Box<archive::ArchiveArgs>),
    Restore(Box<restore::RestoreArgs>),
    Manifest(Box<manifest::ManifestArgs>),
}

pub fn run(args: ImgArgs) -> anyhow::Result<()> {
    match args.command {
        ImgCommand::Create(args) => create::run(args),
        ImgCommand::Amend(args) => amend::run(args),
        ImgCommand::Commit(args) => commit::run(args),
        ImgCommand::Compare(args) => compare::run(*args),
        ImgCommand::Convert(args) => convert::run(*args),
        ImgCommand::Dd(args) => dd::run(&args),
        ImgCommand::Info(args) => info::run(&args),
        ImgCommand::Check(args) => check::run(&args),
        ImgCommand::Map(args) => map::run(args),
        ImgCommand::Bitmap(args) => bitmap::run(args),
        ImgCommand::Measure(args) => measure::run(args),
        ImgCommand::Rebase(args) => rebase::run(args),
        ImgCommand::Resize(args) => resize::run(args),
        ImgCommand::Snapshot(args) => snapshot::run(&args),
        ImgCommand::Bench(args) => bench::run(args),
        ImgCommand::Archive(args) => archive::run(&args),
        ImgCommand::Restore(args) => restore::run(&args),
        ImgCommand::Manifest(args) => manifest::run(&args),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Human,
    Json,
}

pub fn parse_format(name: &str) -> Result<Format, String> {
    Format::from_name(name).map_err(|e| e.to_string())
}

/// Parses a cache mode.
///
/// `unsafe` and `directsync` become their nearest equivalents, because all data is durable at the
/// end of a job.
fn parse_cache(mode: &str) -> Result<Cache, String> {
    match mode {
        "unsafe" => Ok(Cache::Writeback),
        "directsync" => Ok(Cache::None),
        other => other.parse(),
    }
}

fn print(text: impl std::fmt::Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    print(format_args!("{value:#}\n"))
}

/// Parses the options of a new image from `-o`.
///
/// Returns `None` after `-o help`, which prints the options.
pub fn format_options(format: Format, texts: &[String]) -> anyhow::Result<Option<CreateOptions>> {
    let mut options = CreateOptions::new(format);
    for (name, value) in texts.iter().flat_map(|text| pairs(text)) {
        if asks_for_help(&name) {
            option_help::print_options(format, CreateOptions::names(format))?;
            return Ok(None);
        }
        options.set(&name, &value, parse_size)?;
    }
    Ok(Some(options))
}

fn asks_for_help(name: &str) -> bool {
    name == "help" || name == "?"
}

/// Sets the backing file of a new image. `name` and `format` take precedence over `-o`.
fn set_backing(
    options: &mut CreateOptions,
    name: Option<String>,
    format: Option<Format>,
) -> anyhow::Result<()> {
    let given = options.backing.take();
    let name = name.or(given.as_ref().map(|b| b.name.clone()));
    let format = format.or(given.and_then(|b| b.format));
    options.backing = match name {
        // A format without a name is kept, as with `-o backing_fmt` alone.
        None if format.is_none() => None,
        name => Some(Backing {
            name: name.unwrap_or_default(),
            format,
        }),
    };
    if options.format == Format::Raw && options.backing.is_some() {
        bail!("raw images have no backing file; omit -b");
    }
    Ok(())
}

/// Splits `a=b,c=d` into pairs. A doubled comma is a comma in a value; a name alone means `on`.
fn pairs(text: &str) -> Vec<(String, String)> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != ',' {
            parts.last_mut().expect("one at least").push(c);
        } else if chars.next_if_eq(&',').is_some() {
            parts.last_mut().expect("one at least").push(',');
        } else {
            parts.push(String::new());
        }
    }
    parts.retain(|part| !part.is_empty());
    let pair = |part: &String| match part.split_once('=') {
        Some((name, value)) => (name.to_owned(), value.to_owned()),
        None => (part.clone(), "on".to_owned()),
    };
    parts.iter().map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_split_as_qemu_img_does() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(pairs(""), []);
        assert_eq!(pairs("a=b"), [pair("a", "b")]);
        assert_eq!(
            pairs("a=b,,c,d,e=f=g,"),
            [pair("a", "b,c"), pair("d", "on"), pair("e", "f=g")]
        );
    }
}
