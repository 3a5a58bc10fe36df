//! Options of several commands for images.

use super::Output;
use super::watch::WatchArgs;
use crate::servers::absolute;
use anyhow::bail;
use clap::Args;
use fathom_img::{Format, OpenOptions};
use fathom_stack::{KeyRing, KeySource};
use fathom_storage::{Cache, EngineKind};
use fathom_units::parse_size;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::OnceLock;

fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("a rate of 0 bytes a second copies nothing; give a positive rate".into()),
        rate => Ok(rate),
    }
}

/// Option of commands that copy data.
#[derive(Debug, Args)]
pub(crate) struct RateArg {
    /// Limit in bytes per second, such as 100M [default: none]
    #[arg(short, long, value_parser = parse_rate, value_name = "SIZE", alias = "rate-limit")]
    pub(crate) rate: Option<u64>,
}

/// Option of commands that write to an image with an external data file.
#[derive(Debug, Args)]
pub(super) struct DataFileArg {
    /// External data file of the image, to be written
    ///
    /// The command writes to an external data file only if this option names it.
    #[arg(long, value_name = "FILE")]
    pub(super) data_file: Option<PathBuf>,
}

/// Option of commands that read or write encrypted images.
#[derive(Debug, Args)]
pub(crate) struct KeysArg {
    /// Key of encrypted images, such as file:disk.key; repeatable
    ///
    /// file:PATH, credential:NAME (a credential of systemd), fd:N, or command:PROGRAM, which prints
    /// the key. The keys unlock existing images. The first key encrypts new images.
    #[arg(long = "key", value_name = "SOURCE")]
    keys: Vec<KeySource>,
    #[arg(skip)]
    ring: OnceLock<KeyRing>,
}

impl KeysArg {
    /// Adds keys that an image's own options name.
    pub(super) fn and(mut self, more: Vec<KeySource>) -> KeysArg {
        self.keys.extend(more);
        self.ring = OnceLock::new();
        self
    }

    /// Returns the keys. Each key is read once.
    pub(crate) fn ring(&self) -> KeyRing {
        let ring = self.ring.get_or_init(|| KeyRing::new(self.keys.clone()));
        ring.clone()
    }

    /// Returns the sources with absolute paths, for a server in another directory.
    pub(crate) fn absolute(&self) -> anyhow::Result<Vec<KeySource>> {
        let mut keys = self.keys.clone();
        for path in keys.iter_mut().filter_map(KeySource::path_mut) {
            *path = absolute(path)?;
        }
        Ok(keys)
    }
}

/// Options of commands that inspect an image.
#[derive(Debug, Args)]
pub(super) struct LookArgs {
    /// Read the image even if another process writes to it
    #[arg(short = 'U', long)]
    pub(super) force_share: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Form of the output, as for qemu-img
    #[arg(long, value_enum, value_name = "FORM", default_value = "human")]
    output: Output,
}

impl LookArgs {
    pub(super) fn json(&self) -> bool {
        self.json || self.output == Output::Json
    }
}

/// Options of commands that inspect a backing chain.
#[derive(Debug, Args)]
pub(super) struct LookDeepArgs {
    /// Directory with backing files that images may name; repeatable [default: the directory of the
    /// image]
    #[arg(long = "allow-dir", value_name = "DIR")]
    pub(super) allow_dirs: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) look: LookArgs,
}

/// Options of commands that inspect the data of a backing chain.
#[derive(Debug, Args)]
pub(super) struct LookIntoArgs {
    #[command(flatten)]
    pub(super) deep: LookDeepArgs,
    #[command(flatten)]
    pub(super) keys: KeysArg,
}

/// Options of commands that read whole disks.
#[derive(Debug, Args)]
pub(super) struct ReadArgs {
    /// Read images even if other processes write to them
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Directory with files that an image may name, in addition to its own; repeatable
    ///
    /// The files are backing files and external data files. The command only reads them.
    #[arg(long, value_name = "DIR")]
    pub(super) allow_dir: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) keys: KeysArg,
    #[command(flatten)]
    pub(super) watch: WatchArgs,
}

impl ReadArgs {
    /// Fails if standard output is the target of the image and of JSON events.
    pub(super) fn refuse_json_to(&self, target: &OsStr) -> anyhow::Result<()> {
        match target == "-" && self.watch.json() {
            true => {
                bail!(
                    "--json prints events to standard output, to which the image is written; \
                     omit --json"
                )
            }
            false => Ok(()),
        }
    }

    /// Returns the options to open an image of this format.
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
            keys: self.keys.ring(),
            ..OpenOptions::reading(format)
        }
    }
}
