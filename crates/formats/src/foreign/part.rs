//! Access to files of foreign image formats: VMDK, VHDX, VDI and VHD.

use crate::{Error, Result};
use fathom_files::ImageFile;
use fathom_foreign::{Bytes, Description, Kind, Start};
use std::io;

/// A file of a foreign image, as a source of bytes for [`fathom_foreign`].
pub(crate) struct Part<'a>(pub(crate) &'a dyn ImageFile);

impl Bytes for Part<'_> {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let end = at.checked_add(buf.len() as u64);
        match end {
            Some(end) if end <= self.0.len()? => self.0.read_at(buf, at),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
}

/// Describes an image that consists of one file.
pub(crate) fn describe(file: &dyn ImageFile, kind: Kind) -> Result<Description> {
    let start = Start::read(kind, &Part(file)).map_err(refused)?;
    match start.names() {
        [] => describe_with(&start, file, &[]),
        names => Err(Error::unsupported(format!(
            "the image consists of {} more files, which are not read here",
            names.len()
        ))),
    }
}

/// Describes an image that consists of `file` and the files `parts`, which `file` names.
pub(crate) fn describe_with(
    start: &Start,
    file: &dyn ImageFile,
    parts: &[Part<'_>],
) -> Result<Description> {
    let image = start.open(&Part(file), parts).map_err(refused)?;
    Ok(image.describe().clone())
}

/// Converts an error of [`fathom_foreign`] to this crate's [`Error`].
pub(crate) fn refused(error: fathom_foreign::Error) -> Error {
    match error {
        fathom_foreign::Error::Not(kind) => Error::NotThisFormat {
            format: kind.qemu_name(),
        },
        fathom_foreign::Error::Io(source) => Error::Io {
            what: "cannot read its tables",
            source,
        },
        fathom_foreign::Error::Damaged(problem) => Error::Invalid(problem),
        other => Error::Unsupported(other.to_string()),
    }
}
