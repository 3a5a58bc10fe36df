//! A cell's settings, and checks of them.

use std::str::FromStr;
use std::time::Duration;

use fathom_units::short_size;

use super::load::{Load, Scale, Scenario};
use crate::bed::DISK;
use crate::error::{Error, Result};
use crate::experiment::Settings;
use crate::machine::{Aio, FileSystem};
use crate::server::{self, Spec};

/// Where the load runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Side {
    /// On this machine itself.
    Bare,
    /// In a guest whose disk is served by this server.
    Guest(server::Kind),
}

const BARE: &str = "bare";

impl Side {
    /// The accepted values, for help.
    pub const FORM: &str = "bare, fathom, qemu, qemu-main, qemu-no-ioeventfd, qemu-mapped, qsd";
}

impl FromStr for Side {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Side, String> {
        match text {
            BARE => Ok(Side::Bare),
            other => match other.parse() {
                Ok(server::Kind::Socket(_)) => Err(format!(
                    "'{other}': each cell trims and formats the disk; use a server that the lab starts"
                )),
                Ok(kind) => Ok(Side::Guest(kind)),
                Err(_) => Err(format!(
                    "unknown value '{other}'; values are {}",
                    Side::FORM
                )),
            },
        }
    }
}

/// A guest's disk and its environment.
#[derive(Clone, Debug, PartialEq)]
pub struct Bench {
    pub fs: FileSystem,
    pub size: u64,
    pub vcpus: u32,
    pub aio: Aio,
}

/// A cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    pub side: Side,
    pub load: Load,
    pub bench: Bench,
}

/// Runtime of a load at scale 1.
const RUNTIME: Duration = Duration::from_secs(300);
/// Minimum runtime. A median of so short a load means little, but the load is known to work.
const SHORTEST: Duration = Duration::from_secs(2);
/// Space in an image for the file system itself.
const OVERHEAD: u64 = 128 << 20;

impl Cell {
    pub fn new(settings: &Settings) -> Result<Cell> {
        let scale: Scale = settings.word("scale")?;
        let scaled = RUNTIME.mul_f64(scale.0).max(SHORTEST);
        let load = Load {
            scenario: settings.word::<Scenario>("scenario")?,
            threads: Settings::needed("threads", settings.count("threads")?)?,
            runtime: settings.time("runtime")?.unwrap_or(scaled),
            seed: Settings::needed("randseed", settings.count("randseed")?)?,
            scale,
        };
        Ok(Cell {
            side: settings.word("disk")?,
            load,
            bench: Bench {
                fs: settings.word("fs")?,
                size: Settings::needed("size", settings.size("size")?)?,
                vcpus: Settings::needed("vcpus", settings.count("vcpus")?)?,
                aio: settings.word("aio")?,
            },
        })
    }

    /// Checks the settings before anything is run.
    ///
    /// # Errors
    /// One line that says which values do not go together.
    pub fn check(&self) -> Result<()> {
        self.load.check()?;
        let Side::Guest(kind) = &self.side else {
            return Ok(());
        };
        kind.check(&self.bench.spec())?;
        let (needed, size) = (self.load.bytes()?, self.bench.size);
        if needed + needed / 8 + OVERHEAD <= size {
            return Ok(());
        }
        Err(Error::Protocol(format!(
            "the files of {} need {} MiB: give --size more than {}, or less --scale",
            self.load.scenario,
            needed.div_ceil(1 << 20),
            short_size(size)
        )))
    }
}

impl Bench {
    /// Returns the disk's specification without the image. The disk has one queue, as disks had in
    /// 2010.
    pub fn spec(&self) -> Spec<'static> {
        Spec {
            name: DISK,
            aio: self.aio,
            queues: 1,
            ..Spec::default()
        }
    }

    /// Returns a script that trims the guest's device, makes a new file system, and mounts it. No
    /// background work is left afterwards.
    pub fn mount(&self, device: &str, place: &str) -> String {
        let fs = self.fs;
        let options = match fs {
            FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2 => "noinit_itable",
            FileSystem::Xfs | FileSystem::Btrfs => "rw",
        };
        let make = fs.make(device, true);
        format!(
            "/usr/bin/blkdiscard {device} || true\n{make}\n\
             mount -t {fs} -o {options} {device} {place}\n"
        )
    }
}
