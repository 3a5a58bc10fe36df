//! Evidence about a cell's work, observed from outside: collectors on the host for one window, and
//! the guest's part.
//!
//! Each source has one file, which parses its text. [`Sampler`] reads the sources at the window's
//! begin and end, and some of them in between for figures over time. A missing source (no PSI, no
//! schedstat, a device without a queue) is left out and never reported as zero.

mod calls;
mod counters;
mod cpu_limits;
mod device;
pub(crate) mod exits;
mod groups;
pub mod guest;
mod history;
mod instructions;
mod interrupts;
mod io_limits;
mod kernel;
mod kicks;
mod measures;
mod own_io;
mod pressure;
mod processors;
mod sampler;
mod schedstat;
mod threads;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

pub(crate) use cpu_limits::lift as lift_cpu_limit;
pub(crate) use io_limits::lift as lift_io_limit;
pub use measures::measures;
pub use sampler::{Newcomers, Sampler};
pub(crate) use threads::tasks;

use crate::error::{Error, Result};

/// Processes and device that a [`Sampler`] watches, and its interval.
#[derive(Clone, Debug)]
pub struct Watch {
    /// Processes whose threads are watched.
    pub processes: Vec<Watched>,
    /// Name of the block device in /sys/block, such as [`device_below`] returns.
    pub device: Option<String>,
    /// Initial interval between two samples of figures over time. The sampler doubles the interval
    /// if there are too many samples, or if sampling costs too much.
    pub step: Duration,
}

/// A process to watch.
#[derive(Clone, Debug)]
pub struct Watched {
    /// Process id on this machine.
    pub pid: u32,
    /// Kind of the process, from which the roles of its threads follow.
    pub kind: Kind,
    /// Whether the process's I/O threads poll instead of sleeping.
    pub polls: bool,
}

/// Kind of a process, which determines the roles of its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// QEMU, with vCPUs, a main loop and I/O threads.
    Qemu,
    /// The disk's server.
    Server,
    /// The load.
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
    /// Describes a process whose I/O threads sleep until they have work.
    pub fn new(pid: u32, kind: Kind) -> Watched {
        Watched {
            pid,
            kind,
            polls: false,
        }
    }
}

/// Returns the name of the block device below an image, or `None` for no device or several.
///
/// # Errors
/// When the image cannot be opened.
pub fn device_below(image: &Path) -> Result<Option<String>> {
    let located = crate::attach::locate(image)?;
    Ok(located.device.map(|device| device.name))
}

/// Returns the major and minor number of the block device below an image.
///
/// # Errors
/// When there is no single device, or its numbers cannot be read.
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

/// Maximum size of a file of /proc or /sys in bytes.
const MAX_TEXT: u64 = 4 << 20;

/// Reads a text file of /proc or /sys.
fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_TEXT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
