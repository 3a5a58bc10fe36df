//! The places of LUKS headers in files.

use crate::Error;
use crate::qcow2::CryptoHeader;
use fathom_files::ImageFile;
use fathom_luks::{Bytes, Header};
use std::io;

/// A part of a file that holds a LUKS header, its key slots and possibly data.
pub(crate) struct Part<'a> {
    pub(crate) file: &'a dyn ImageFile,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl<'a> Part<'a> {
    /// Returns the first `len` bytes of a file.
    pub(crate) fn all_of(file: &'a dyn ImageFile, len: u64) -> Part<'a> {
        Part {
            file,
            start: 0,
            len,
        }
    }

    /// Returns the part of a qcow2 image that holds the encryption header.
    pub(crate) fn within(file: &'a dyn ImageFile, crypto: CryptoHeader) -> Part<'a> {
        Part {
            file,
            start: crypto.offset.0,
            len: crypto.len,
        }
    }

    pub(crate) fn header(&self) -> Result<Header, fathom_luks::Error> {
        Header::read(self)
    }
}

impl Bytes for Part<'_> {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        match at.checked_add(buf.len() as u64) {
            Some(end) if end <= self.len => self.file.read_at(buf, self.start + at),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.len)
    }
}

/// Reads the LUKS header of a qcow2 image, which must have version 1.
pub(crate) fn qcow2_header(part: &Part) -> Result<Header, fathom_luks::Error> {
    let header = part.header()?;
    match header.version() {
        1 => Ok(header),
        _ => {
            let problem =
                "encrypted by LUKS of a version other than 1, which qcow2 does not support";
            Err(fathom_luks::Error::Unsupported(problem.into()))
        }
    }
}

/// Converts an error of [`fathom_luks`] to this crate's [`Error`].
pub(crate) fn refused(error: fathom_luks::Error) -> Error {
    match error {
        fathom_luks::Error::NotLuks => Error::NotThisFormat { format: "luks" },
        fathom_luks::Error::Io(source) => Error::Io {
            what: "cannot read its encryption header",
            source,
        },
        fathom_luks::Error::Unsupported(problem) => Error::Unsupported(problem),
        other => Error::Invalid(other.to_string()),
    }
}
