//! Errors: one line each, for the person who gave the disk and the key.

use fathom_units::cause;
use std::io;

/// Why something of LUKS was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no LUKS header.
    #[error("there is no LUKS header here: is it the right file?")]
    NotLuks,
    /// No slot that could be tried opens by the passphrase. Another one may.
    #[error("the key opens none of the key slots: check the passphrase or the key file")]
    WrongKey,
    /// A volume key that is not this header's.
    #[error("the volume key does not belong to this LUKS header: unlock it again")]
    WrongVolumeKey,
    /// It may be a good header, but this program has no use for it.
    #[error("{0}")]
    Unsupported(String),
    /// The header contradicts itself or its file.
    #[error("the LUKS header is damaged: {0}; restore it from a backup of the header")]
    Damaged(String),
    /// Trying further slots would take minutes.
    #[error(
        "trying key slot {slot} would take too long after those tried before it: name the key \
         slot to open"
    )]
    TooSlow {
        /// The first slot that was not tried.
        slot: u32,
    },
    /// A key derivation that needs more memory than there is.
    #[error("{mib} MiB of memory for a key slot are not to be had: free some and try again")]
    NoMemory {
        /// What it needs.
        mib: u64,
    },
    /// No bytes at all.
    #[error("the passphrase is empty: give one of at least one byte")]
    PassphraseEmpty,
    /// More than [`MAX_PASSPHRASE`](crate::MAX_PASSPHRASE) bytes.
    #[error("the passphrase or key file has more than 8 MiB: give a shorter one")]
    PassphraseTooLong,
    /// Every slot is taken.
    #[error("all key slots are in use: remove one first")]
    NoFreeSlot,
    /// There is nothing in it.
    #[error("key slot {0} is not in use: see which ones are in the header's description")]
    NoSuchSlot(u32),
    /// Without it nobody would ever read the payload again.
    #[error("key slot {0} is the last one that opens the disk: add another one before removing it")]
    LastKey(u32),
    /// The header could not be read.
    #[error("cannot read the LUKS header: {}", cause(.0))]
    Io(#[from] io::Error),
    /// The kernel gave no random bytes.
    #[error("the kernel gave no random bytes: {}", cause(.0))]
    Random(getrandom::Error),
}

impl Error {
    pub(crate) fn unsupported(what: impl Into<String>) -> Error {
        Error::Unsupported(what.into())
    }

    pub(crate) fn damaged(what: impl Into<String>) -> Error {
        Error::Damaged(what.into())
    }
}

/// With this crate's errors.
pub type Result<T> = std::result::Result<T, Error>;
