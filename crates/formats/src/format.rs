//! The formats that images can have.

use crate::{Error, Result, qcow2, qed};
use fathom_files::ImageFile;
use fathom_foreign::Kind;
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
    /// Another program's, which is only read.
    Foreign(Kind),
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 8] = [
        Format::Raw,
        Format::Qcow2,
        Format::Qed,
        Format::Luks,
        Format::Foreign(Kind::Vmdk),
        Format::Foreign(Kind::Vhdx),
        Format::Foreign(Kind::Vdi),
        Format::Foreign(Kind::Vhd),
    ];

    /// Its name on the command line and in images.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Qed => "qed",
            Format::Luks => "luks",
            Format::Foreign(kind) => kind.qemu_name(),
        }
    }

    /// Whether its tables say where the disk's bytes are.
    pub fn has_tables(self) -> bool {
        match self {
            Format::Raw | Format::Luks | Format::Foreign(_) => false,
            Format::Qcow2 | Format::Qed => true,
        }
    }

    /// Images of it are not made or written to here.
    pub fn is_only_read(self) -> bool {
        matches!(self, Format::Foreign(_))
    }

    /// The format of that name.
    pub fn from_name(name: &str) -> Result<Format> {
        let found = Format::ALL.into_iter().find(|f| f.name() == name);
        found.ok_or_else(|| {
            Error::unsupported(format!(
                "format '{name}' is not supported, only raw, qcow2, qed and luks, and for reading vmdk, vhdx, vdi and vpc"
            ))
        })
    }

    /// The format that the first bytes look like. Only for tools that show:
    /// a guest writes the first bytes of its raw disk as it likes, so
    /// probing must never decide how a disk is served.
    pub fn probe(file: &dyn ImageFile) -> Result<Format> {
        let mut start = [0; Kind::START];
        file.read_at(&mut start, 0)
            .map_err(Error::io("cannot be read"))?;
        let has = |magic: &[u8]| start.starts_with(magic);
        Ok(match Kind::of_start(&start) {
            _ if has(&qcow2::MAGIC) => Format::Qcow2,
            _ if has(&qed::MAGIC) => Format::Qed,
            _ if Header::is_luks(&start) => Format::Luks,
            Some(kind) => Format::Foreign(kind),
            None => Format::Raw,
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
