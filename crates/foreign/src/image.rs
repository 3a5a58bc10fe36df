//! An image of any supported format.

use crate::bytes::Bytes;
use crate::describe::Description;
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::part::{Disk, Part};
use crate::place::{Extent, Place};
use crate::source::Source;
use crate::vmdk::Descriptor;
use crate::{vdi, vhd, vhdx, vmdk};

/// An image whose files are known but not yet opened.
#[derive(Debug)]
pub struct Start {
    kind: Kind,
    /// Descriptor of a VMDK image in several files.
    descriptor: Option<Descriptor>,
}

impl Start {
    /// Reads the start of `main`, the file that the user named.
    pub fn read(kind: Kind, main: &dyn Bytes) -> Result<Start> {
        let descriptor = match kind {
            Kind::Vmdk => vmdk::descriptor(&Source::new(main)?)?,
            Kind::Vhdx | Kind::Vdi | Kind::Vhd | Kind::VhdSized(_) => None,
        };
        Ok(Start { kind, descriptor })
    }

    /// Returns the names of further files, each once.
    ///
    /// The files are in the directory of the first file, so the names contain no slash. Only VMDK
    /// images have further files.
    pub fn names(&self) -> &[String] {
        self.descriptor.as_ref().map_or(&[], |text| &text.names)
    }

    /// Reads and checks the headers and all tables.
    ///
    /// `main` must be the file given to [`Start::read`]. `parts` must be the files of
    /// [`Start::names`].
    ///
    /// Reads about as many bytes as the tables contain. The tables use at most
    /// [`MAX_TABLES`](crate::MAX_TABLES) bytes of memory. A VHDX image whose log is not empty
    /// temporarily uses about 100 MiB more.
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

/// An image that has been read and checked. Later changes to its files are not noticed.
#[derive(Debug)]
pub struct Image {
    disk: Disk,
}

impl Image {
    /// Returns the size of the guest's disk in bytes.
    pub fn size(&self) -> u64 {
        self.disk.description.size
    }

    /// Returns the location of the guest's byte `offset` and of contiguous bytes after it.
    ///
    /// The extent has at least one byte and at most `len` bytes. The extent may end before the
    /// contiguous data does, because a lookup has a bounded number of steps: 256 MiB with the
    /// smallest usual blocks.
    ///
    /// The extent is inside its file, unless the file has been truncated since. If `len` is 0 or
    /// `offset` is at or beyond [`Image::size`], the extent is empty. This method reads no files
    /// and allocates no memory.
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

    /// Returns the properties of the image.
    pub fn describe(&self) -> &Description {
        &self.disk.description
    }
}
