//! What is asked for, and what is told.

use fathom_nbd::NbdUri;
use serde::Serialize;
use std::path::PathBuf;

/// Which disk is to come here, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    pub source: NbdUri,
    /// The image that it comes to, if that is a file.
    pub image: Option<PathBuf>,
    /// Where it is noted how far it is.
    pub record: PathBuf,
    /// Bytes a second; None: as many as there can be.
    pub rate: Option<u64>,
    /// The guest goes on here at once, and what is not here yet follows.
    pub post_copy: bool,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The guest runs where it was; what it has changed is copied again and again.
    Copying,
    /// Likewise, and what is left takes no longer than a guest can wait.
    Ready,
    /// The disk has been taken over, and the guest waits for the rest.
    Switching,
    /// The disk has been taken over, the guest runs here, and the rest follows.
    Arriving,
    /// All of it is here.
    Done,
}

impl Phase {
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    pub phase: Phase,
    /// Bytes that have been copied, some of them several times.
    pub copied: u64,
    /// Bytes that are still to be copied, as far as is known.
    pub left: u64,
    /// Why it does not go on at the moment; it is tried again.
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
