//! Errors, each of one line, for the person who supplied the image.

use crate::kind::Kind;
use fathom_units::cause;
use std::io;

/// A reason why an image cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is not an image of this format.
    #[error("this is not a {0} image: check its name and format")]
    Not(Kind),
    /// The image contains only the differences from a parent image.
    #[error("this {kind} image has only what differs from another one, its parent: {remedy}")]
    Differencing {
        /// Format of the image.
        kind: Kind,
        /// How to merge the image with its parent.
        remedy: &'static str,
    },
    /// The image may be valid, but Fathom does not support it.
    #[error("{0}")]
    Unsupported(String),
    /// The image contradicts itself, or its file is too short.
    #[error("the image is damaged: {0}; copy it anew, or repair it with the program that made it")]
    Damaged(String),
    /// The image's tables need more memory than the limit allows.
    #[error(
        "the image's tables need more than {} MiB of memory: convert it with the program that made \
         it", crate::limits::MAX_TABLES >> 20
    )]
    TooLarge,
    /// The number of files given differs from the number that the descriptor names.
    #[error("the image is in {named} files beside its descriptor, but {given} were given")]
    Parts {
        /// Number of files that the descriptor names.
        named: usize,
        /// Number of files given.
        given: usize,
    },
    /// Reading a file of the image failed.
    #[error("cannot read the image: {}", cause(.0))]
    Io(#[from] io::Error),
}

impl Error {
    pub(crate) fn unsupported(what: impl Into<String>) -> Error {
        Error::Unsupported(what.into())
    }

    pub(crate) fn damaged(what: impl Into<String>) -> Error {
        Error::Damaged(what.into())
    }

    pub(crate) fn differencing(kind: Kind) -> Error {
        let remedy = match kind {
            Kind::Vmdk => "make it whole by `qemu-img convert` or `vmware-vdiskmanager -r`",
            Kind::Vhdx | Kind::Vhd | Kind::VhdSized(_) => {
                "make it whole by PowerShell's Merge-VHD or Convert-VHD"
            }
            Kind::Vdi => "make it whole by `VBoxManage clonemedium`",
        };
        Error::Differencing { kind, remedy }
    }
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
