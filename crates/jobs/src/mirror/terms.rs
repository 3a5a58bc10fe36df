//! What is asked for, and what is told.

use fathom_core::Disk;
use fathom_formats::served::ImageDisk;
use std::sync::Arc;

/// How it is to be copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Bytes a second; None: as many as there can be.
    pub rate: Option<u64>,
    /// Users change no more than is copied meanwhile.
    pub brakes: bool,
}

/// Where a disk is copied to.
pub enum Target {
    /// Another disk, which is not active, and used by nobody else.
    Other(Arc<dyn Disk>),
    /// The image below that disk that is written to, too: what those above it have is copied into it, where nobody sees it
    /// because of them. It is the same disk all the time to those who go by the chain.
    Below(Arc<ImageDisk>),
}

impl Target {
    /// The error is for the user.
    pub(super) fn disk(&self) -> Result<Arc<dyn Disk>, String> {
        Ok(match self {
            Target::Other(disk) => disk.clone(),
            Target::Below(image) => image.beside().ok_or("it has no image below to copy to")?,
        })
    }
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// What there is is copied, and what users have changed meanwhile again.
    #[default]
    Copying,
    /// What is left takes no longer than users can wait.
    Ready,
    /// Its virtual machine has let go of the disk, which others may have now. When it is back, and nobody has changed
    /// anything, this goes on.
    Waiting,
    /// Both were the same, when this had let go of them.
    Done,
    /// The copy is of no use.
    Failed,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Copying => "copying",
            Phase::Ready => "ready",
            Phase::Waiting => "waiting",
            Phase::Done => "done",
            Phase::Failed => "failed",
        }
    }

    /// It has let go of both disks, or is about to.
    pub fn is_over(self) -> bool {
        matches!(self, Phase::Done | Phase::Failed)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub phase: Phase,
    /// Bytes that have been copied, some of them several times.
    pub copied: u64,
    /// Bytes that are still to be copied, as far as is known.
    pub left: u64,
    /// Why the copy is of no use.
    pub problem: Option<String>,
}

/// Hears of each change of phase, on the mirror's thread.
pub type Tell = Box<dyn Fn(Phase, Option<&str>) + Send>;
