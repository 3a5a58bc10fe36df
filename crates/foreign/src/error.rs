//! Errors: one line each, for the person who gave the image.

use crate::kind::Kind;
use fathom_units::cause;
use std::io;

/// Why an image cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is something else.
    #[error("this is not a {0} image: check its name and format")]
    Not(Kind),
    /// What is not in it is in another image.
    #[error("this {kind} image has only what differs from another one, its parent: {remedy}")]
    Differencing {
        /// Which format it is.
        kind: Kind,
        /// How to make it one that is whole.
        remedy: &'static str,
    },
    /// It may be a good image, but this program has no use for it.
    #[error("{0}")]
    Unsupported(String),
    /// It contradicts itself, or its file is too short.
    #[error("the image is damaged: {0}; copy it anew, or repair it with the program that made it")]
    Damaged(String),
    /// For more memory than an image is worth.
    #[error(
        "the image's tables need more than {} MiB of memory: convert it with the program that made \
         it", crate::limits::MAX_TABLES >> 20
    )]
    TooLarge,
    /// It is in other files than it was given.
    #[error("the image is in {named} files beside its descriptor, but {given} were given")]
    Parts {
        /// How many its descriptor names.
        named: usize,
        /// How many there are.
        given: usize,
    },
    /// A file of it could not be read.
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

/// With this crate's errors.
pub type Result<T> = std::result::Result<T, Error>;
