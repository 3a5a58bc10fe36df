//! Options that several commands have.

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

/// Of a command that reads or writes what may be encrypted.
#[derive(Debug, Args)]
pub(crate) struct KeysArg {
    /// What unlocks encrypted images, and encrypts new ones: file:PATH, credential:NAME (systemd's), fd:N or
    /// command:PROGRAM, which prints it; may be given several times: the first encrypts
    #[arg(long = "key", value_name = "SOURCE")]
    keys: Vec<KeySource>,
    #[arg(skip)]
    ring: OnceLock<KeyRing>,
}

impl KeysArg {
    /// What options say of an image, too.
    pub(super) fn and(mut self, more: Vec<KeySource>) -> KeysArg {
        self.keys.extend(more);
        self.ring = OnceLock::new();
        self
    }

    /// Each is read once, whatever needs it.
    pub(crate) fn ring(&self) -> KeyRing {
        let ring = self.ring.get_or_init(|| KeyRing::new(self.keys.clone()));
        ring.clone()
    }

    /// As a server sees them, which is in another directory.
    pub(crate) fn absolute(&self) -> anyhow::Result<Vec<KeySource>> {
        let mut keys = self.keys.clone();
        for path in keys.iter_mut().filter_map(KeySource::path_mut) {
            *path = absolute(path)?;
        }
        Ok(keys)
    }
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

/// Likewise, at what is in it.
#[derive(Debug, Args)]
pub(super) struct LookIntoArgs {
    #[command(flatten)]
    pub(super) deep: LookDeepArgs,
    #[command(flatten)]
    pub(super) keys: KeysArg,
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
    pub(super) keys: KeysArg,
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
            keys: self.keys.ring(),
            ..OpenOptions::reading(format)
        }
    }
}
