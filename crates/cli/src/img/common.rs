//! Options that several commands have.

use super::watch::WatchArgs;
use super::{Output, parse_format};
use anyhow::bail;
use clap::Args;
use fathom_img::{Format, OpenOptions};
use fathom_storage::{Cache, EngineKind};
use fathom_units::parse_size;
use std::ffi::OsStr;
use std::path::PathBuf;

/// Of a command on one image.
#[derive(Debug, Args)]
pub(super) struct FormatArg {
    /// Format of the image; by default what it looks like
    #[arg(short, long, value_parser = parse_format)]
    pub(super) format: Option<Format>,
}

fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("nothing moves at 0 bytes a second".into()),
        rate => Ok(rate),
    }
}

/// Of a command that moves data.
#[derive(Debug, Args)]
pub(crate) struct RateArg {
    /// Bytes a second, at most
    #[arg(short, long, value_parser = parse_rate, value_name = "SIZE", alias = "rate-limit")]
    pub(crate) rate: Option<u64>,
}

/// Of a command that writes to an image which may have an external data file.
#[derive(Debug, Args)]
pub(super) struct DataFileArg {
    /// The external data file of the image that is written to; an image alone cannot choose one
    #[arg(long, value_name = "FILE")]
    pub(super) data_file: Option<PathBuf>,
}

/// Of a command that looks at an image and says what it has found.
#[derive(Debug, Args)]
pub(super) struct LookArgs {
    /// Read the image even though another process writes to it
    #[arg(short = 'U', long)]
    pub(super) force_share: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The same, as qemu-img has it
    #[arg(long, value_enum, value_name = "FORM", default_value = "human")]
    output: Output,
}

impl LookArgs {
    pub(super) fn json(&self) -> bool {
        self.json || self.output == Output::Json
    }
}

/// Likewise, at all of its chain.
#[derive(Debug, Args)]
pub(super) struct LookDeepArgs {
    /// Let images use files in this directory as backing files; repeatable [default: the image's
    /// own directory]
    #[arg(long = "allow-dir", value_name = "DIR")]
    pub(super) allow_dirs: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) look: LookArgs,
}

/// Of a command that reads disks from beginning to end.
#[derive(Debug, Args)]
pub(super) struct ReadArgs {
    /// Read images even though other processes write to them
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Directory in which an image may name files to be read, besides its own
    #[arg(long, value_name = "DIR")]
    pub(super) allow_dir: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) watch: WatchArgs,
}

impl ReadArgs {
    /// Events and an image do not both fit into standard output.
    pub(super) fn refuse_json_to(&self, target: &OsStr) -> anyhow::Result<()> {
        match target == "-" && self.watch.json() {
            true => {
                bail!("--json prints events to standard output, where the image goes: leave it out")
            }
            false => Ok(()),
        }
    }

    /// How to open an image of this format.
    pub(super) fn open(
        &self,
        format: Option<Format>,
        cache: Cache,
        aio: EngineKind,
    ) -> OpenOptions {
        OpenOptions {
            cache,
            engine: aio,
            force_share: self.force_share,
            allow_dirs: self.allow_dir.clone(),
            ..OpenOptions::reading(format)
        }
    }
}
