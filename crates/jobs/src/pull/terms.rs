//! Parameters and status of a pull.

use fathom_nbd::NbdUri;
use serde::Serialize;
use std::path::PathBuf;

/// Parameters of a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// URI of the disk's NBD export on the server from which the disk moves.
    pub source: NbdUri,
    /// The image to which the disk is copied, if the image is a file.
    pub image: Option<PathBuf>,
    /// The path of the record.
    pub record: PathBuf,
    /// Limit in bytes per second. `None` means no limit.
    pub rate: Option<u64>,
    /// Whether the guest runs here at once, while the remaining data is copied.
    pub post_copy: bool,
}

/// The phase of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The guest runs on the other server; its changes are copied again and again.
    Copying,
    /// Like `Copying`, but the remaining data takes no longer than a guest can wait.
    Ready,
    /// The disk has been taken over, and the guest waits for the remaining data.
    Switching,
    /// The disk has been taken over, and the guest runs here while the remaining data is copied.
    Arriving,
    /// All data is here.
    Done,
}

impl Phase {
    /// Returns the name of the phase, as events and the API show it.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Copying => "copying",
            Phase::Ready => "ready",
            Phase::Switching => "switching",
            Phase::Arriving => "arriving",
            Phase::Done => "done",
        }
    }
}

/// Progress of a pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The phase of the pull.
    pub phase: Phase,
    /// Number of bytes copied; ranges copied several times count each time.
    pub copied: u64,
    /// Estimated number of bytes still to be copied.
    pub left: u64,
    /// The problem that stops the pull at the moment; the pull retries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl Default for Status {
    fn default() -> Status {
        Status {
            phase: Phase::Copying,
            copied: 0,
            left: 0,
            problem: None,
        }
    }
}
