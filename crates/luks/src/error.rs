//! Errors, each of one line, for the person who supplied the disk and the key.

use fathom_units::cause;
use std::io;

/// A reason why a LUKS operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file contains no LUKS header.
    #[error("there is no LUKS header here: is it the right file?")]
    NotLuks,
    /// The passphrase opens none of the slots that could be tried. Another passphrase might.
    #[error("the key opens none of the key slots: check the passphrase or the key file")]
    WrongKey,
    /// The volume key does not belong to this header.
    #[error("the volume key does not belong to this LUKS header: unlock it again")]
    WrongVolumeKey,
    /// The header may be valid, but Fathom does not support it.
    #[error("{0}")]
    Unsupported(String),
    /// The header contradicts itself or the file that contains it.
    #[error("the LUKS header is damaged: {0}; restore it from a backup of the header")]
    Damaged(String),
    /// Trying further key slots would take minutes.
    #[error(
        "trying key slot {slot} would take too long after those tried before it: name the key \
         slot to open"
    )]
    TooSlow {
        /// Number of the first slot that was not tried.
        slot: u32,
    },
    /// A key derivation needs more memory than is available.
    #[error("{mib} MiB of memory for a key slot are not to be had: free some and try again")]
    NoMemory {
        /// Memory that the key derivation needs, in MiB.
        mib: u64,
    },
    /// The passphrase has no bytes.
    #[error("the passphrase is empty: give one of at least one byte")]
    PassphraseEmpty,
    /// The passphrase has more than [`MAX_PASSPHRASE`](crate::MAX_PASSPHRASE) bytes.
    #[error("the passphrase or key file has more than 8 MiB: give a shorter one")]
    PassphraseTooLong,
    /// All key slots are in use.
    #[error("all key slots are in use: remove one first")]
    NoFreeSlot,
    /// The key slot is not in use.
    #[error("key slot {0} is not in use: see which ones are in the header's description")]
    NoSuchSlot(u32),
    /// The key slot is the last one that opens the disk; without it, the payload could never be
    /// read again.
    #[error("key slot {0} is the last one that opens the disk: add another one before removing it")]
    LastKey(u32),
    /// Reading the header failed.
    #[error("cannot read the LUKS header: {}", cause(.0))]
    Io(#[from] io::Error),
    /// The kernel returned no random bytes.
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

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
