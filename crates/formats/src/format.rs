//! The formats that images can have.

use crate::{Error, Result, qcow2, qed};
use fathom_files::ImageFile;
use fathom_luks::Header;
use std::fmt;

/// The formats there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The file's bytes are the disk's.
    Raw,
    /// See [`crate::qcow2`].
    Qcow2,
    /// See [`crate::qed`].
    Qed,
    /// A raw disk, encrypted, behind its header.
    Luks,
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 4] = [Format::Raw, Format::Qcow2, Format::Qed, Format::Luks];

    /// Its name on the command line and in images.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Qed => "qed",
            Format::Luks => "luks",
        }
    }

    /// Whether its tables say where the disk's bytes are.
    pub fn has_tables(self) -> bool {
        match self {
            Format::Raw | Format::Luks => false,
            Format::Qcow2 | Format::Qed => true,
        }
    }

    /// The format of that name.
    pub fn from_name(name: &str) -> Result<Format> {
        let found = Format::ALL.into_iter().find(|f| f.name() == name);
        found.ok_or_else(|| {
            Error::unsupported(format!(
                "format '{name}' is not supported, only raw, qcow2, qed and luks"
            ))
        })
    }

    /// The format that the first bytes look like. Only for tools that show:
    /// a guest writes the first bytes of its raw disk as it likes, so
    /// probing must never decide how a disk is served.
    pub fn probe(file: &dyn ImageFile) -> Result<Format> {
        let mut start = [0; 8];
        file.read_at(&mut start, 0)
            .map_err(Error::io("cannot be read"))?;
        let [magic @ .., _, _, _, _] = start;
        Ok(match magic {
            qcow2::MAGIC => Format::Qcow2,
            qed::MAGIC => Format::Qed,
            _ if Header::is_luks(&start) => Format::Luks,
            _ => Format::Raw,
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
