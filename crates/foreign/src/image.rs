//! An image of any of the formats.

use crate::bytes::Bytes;
use crate::describe::Description;
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::part::{Disk, Part};
use crate::place::{Extent, Place};
use crate::source::Source;
use crate::vmdk::Descriptor;
use crate::{vdi, vhd, vhdx, vmdk};

/// An image of which is known in what files it is.
#[derive(Debug)]
pub struct Start {
    kind: Kind,
    /// The text file of a VMDK image in several files.
    descriptor: Option<Descriptor>,
}

impl Start {
    /// Looks into `main`, the file that the user named.
    pub fn read(kind: Kind, main: &dyn Bytes) -> Result<Start> {
        let descriptor = match kind {
            Kind::Vmdk => vmdk::descriptor(&Source::new(main)?)?,
            Kind::Vhdx | Kind::Vdi | Kind::Vhd | Kind::VhdSized(_) => None,
        };
        Ok(Start { kind, descriptor })
    }

    /// Names of further files, each once, which are in the directory of the
    /// first: bare names, without a slash. None but for VMDK.
    pub fn names(&self) -> &[String] {
        self.descriptor.as_ref().map_or(&[], |text| &text.names)
    }

    /// Reads and checks headers and all tables. `main` is the same as before,
    /// `parts` are the files of [`Start::names`].
    ///
    /// Reads about as much as the tables have, which takes no more than
    /// [`MAX_TABLES`](crate::MAX_TABLES) bytes of memory. (A VHDX image whose
    /// log is not empty takes some 100 MiB more meanwhile.)
    pub fn open<B: Bytes>(&self, main: &dyn Bytes, parts: &[B]) -> Result<Image> {
        let (named, given) = (self.names().len(), parts.len());
        if named != given {
            return Err(Error::Parts { named, given });
        }
        let main = Source::new(main)?;
        let disk = match (&self.descriptor, self.kind) {
            (Some(descriptor), _) => {
                let parts = parts.iter().map(|part| Source::new(part));
                vmdk::read_described(descriptor, &parts.collect::<Result<Vec<_>>>()?)?
            }
            (None, Kind::Vmdk) => vmdk::read_single(&main)?,
            (None, Kind::Vhdx) => vhdx::read(&main)?,
            (None, Kind::Vdi) => vdi::read(&main)?,
            (None, Kind::Vhd) => vhd::read(&main, None)?,
            (None, Kind::VhdSized(size)) => vhd::read(&main, Some(size))?,
        };
        Ok(Image { disk })
    }
}

/// An image that was read and checked. It is what was there at that time.
#[derive(Debug)]
pub struct Image {
    disk: Disk,
}

impl Image {
    /// Bytes of the guest's disk.
    pub fn size(&self) -> u64 {
        self.disk.description.size
    }

    /// Where the guest's byte `offset` lies, and at most `len` bytes from
    /// there, as far as they follow each other: at least one byte, and not
    /// always as many as there are (256 MiB of the smallest usual blocks).
    ///
    /// All are in their file, if it is as long as it was. Of what is not on
    /// the disk (from [`Image::size`] on) or of no length, the result has
    /// none. Reads and allocates nothing.
    pub fn lookup(&self, offset: u64, len: u64) -> Extent {
        let parts = &self.disk.parts;
        let after = parts.partition_point(|part| part.start <= offset);
        let part: Option<&Part> = after.checked_sub(1).map(|index| &parts[index]);
        match part {
            Some(part) if len > 0 && offset - part.start < part.len => {
                part.lookup(offset - part.start, len)
            }
            _ => Extent {
                len: 0,
                place: Place::Zero,
            },
        }
    }

    /// What is in it.
    pub fn describe(&self) -> &Description {
        &self.disk.description
    }
}
