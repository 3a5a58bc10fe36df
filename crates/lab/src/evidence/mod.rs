//! What is seen around a cell's work from outside: collectors of the host for one window, and the
//! guest's half of it.
//!
//! One file a source, which knows its text; [`Sampler`] reads them at the window's begin and end,
//! and a few of them in between for figures over time. What is not there (no PSI, no schedstat, a
//! device without a queue) is left out and never zero.

mod calls;
mod cgroup;
mod counters;
mod device;
pub(crate) mod exits;
pub mod guest;
mod history;
mod instructions;
mod interrupts;
mod kernel;
mod kicks;
mod measures;
mod pressure;
mod processors;
mod sampler;
mod schedstat;
mod threads;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

pub(crate) use cgroup::lift;
pub use measures::measures;
pub use sampler::{Newcomers, Sampler};
pub(crate) use threads::tasks;

use crate::error::{Error, Result};

/// What a [`Sampler`] looks at.
#[derive(Clone, Debug)]
pub struct Watch {
    pub processes: Vec<Watched>,
    /// A block device's name in /sys/block, such as [`device_below`] finds.
    pub device: Option<String>,
    /// Between two samples of figures over time, at first: it doubles when there are too many, or
    /// when they cost too much.
    pub step: Duration,
}

/// A process to look at.
#[derive(Clone, Debug)]
pub struct Watched {
    pub pid: u32,
    pub kind: Kind,
    /// Its I/O threads look for work without sleeping.
    pub polls: bool,
}

/// What a process is: how the roles of its threads are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Qemu,
    /// It serves the disk.
    Server,
    /// It is the load.
    Load,
}

impl Default for Watch {
    fn default() -> Watch {
        Watch {
            processes: Vec::new(),
            device: None,
            step: Duration::from_millis(100),
        }
    }
}

impl Watched {
    pub fn new(pid: u32, kind: Kind) -> Watched {
        Watched {
            pid,
            kind,
            polls: false,
        }
    }
}

/// The name of the block device below an image; `None` where there is none, or several.
///
/// # Errors
/// When the image cannot be opened.
pub fn device_below(image: &Path) -> Result<Option<String>> {
    let located = crate::attach::locate(image)?;
    Ok(located.device.map(|device| device.name))
}

/// The numbers of the block device below an image.
///
/// # Errors
/// When there is no one device, or it cannot be looked at.
pub fn device_numbers(image: &Path) -> Result<(u32, u32)> {
    let unknown = || Error::Unusable {
        path: image.to_owned(),
        reason: "the block device below it is not known".into(),
    };
    let name = device_below(image)?.ok_or_else(unknown)?;
    let text = read(format!("/sys/class/block/{name}/dev")).unwrap_or_default();
    let numbers = text.trim().split_once(':');
    numbers
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
        .ok_or_else(unknown)
}

/// Of a file of /proc or /sys.
const MAX_TEXT: u64 = 4 << 20;

/// The text of a file of /proc or /sys.
fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_TEXT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
