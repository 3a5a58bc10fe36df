//! Reading an image's header.

use super::SnapshotName;
use super::info::read_snapshots;
use crate::foreign::describe;
use crate::luks::{Part, refused};
use crate::{Error, Format, Result, qcow2, qed};
use fathom_files::{ImageFile, read_up_to};

/// An image by its header.
#[derive(Clone, Debug)]
pub enum Image {
    /// No header at all; the disk's size in bytes.
    Raw { size: u64 },
    /// Boxed for its size.
    Qcow2(Box<qcow2::Header>),
    /// With the backing file's name.
    Qed(qed::Header, Option<Vec<u8>>),
    /// With the disk's size in bytes.
    Luks(Box<fathom_luks::Header>, u64),
    /// What it says of itself.
    Foreign(Box<fathom_foreign::Description>),
}

impl Image {
    /// Whether there can be bitmaps in it.
    pub fn can_have_bitmaps(&self) -> bool {
        matches!(self, Image::Qcow2(header) if header.version >= 3)
    }

    /// Reads the header of an image of this format.
    pub fn read(file: &dyn ImageFile, format: Format) -> Result<Image> {
        match format {
            Format::Raw => Ok(Image::Raw {
                size: file.len().map_err(Error::io("cannot read its size"))?,
            }),
            Format::Qcow2 => {
                let header = qcow2::Header::parse(&qcow2_first_cluster(file)?)?;
                Ok(Image::Qcow2(Box::new(header)))
            }
            Format::Qed => read_qed(file),
            Format::Luks => read_luks(file),
            Format::Foreign(kind) => Ok(Image::Foreign(Box::new(describe(file, kind)?))),
        }
    }

    /// The image as it was when this internal snapshot was taken.
    pub fn at_snapshot(self, file: &dyn ImageFile, name: &SnapshotName) -> Result<Image> {
        let Image::Qcow2(mut header) = self else {
            let format = self.format();
            return Err(Error::unsupported(format!(
                "{format} images have no internal snapshots"
            )));
        };
        let snapshots = read_snapshots(file, &header)?;
        let snapshot = name.find(&snapshots)?;
        header.size = snapshot.disk_size().unwrap_or(header.size);
        header.l1_offset = snapshot.l1_offset;
        header.l1_entries = snapshot.l1_entries;
        header.validate_tables()?;
        Ok(Image::Qcow2(header))
    }

    /// Its format.
    pub fn format(&self) -> Format {
        match self {
            Image::Raw { .. } => Format::Raw,
            Image::Qcow2(_) => Format::Qcow2,
            Image::Qed(..) => Format::Qed,
            Image::Luks(..) => Format::Luks,
            Image::Foreign(image) => Format::Foreign(image.kind),
        }
    }

    /// The disk's size in bytes: whole sectors, as QEMU counts it.
    pub fn size(&self) -> u64 {
        match self {
            Image::Raw { size } => size.next_multiple_of(512),
            Image::Qcow2(header) => header.size & !511,
            Image::Qed(header, _) => header.image_size,
            Image::Luks(_, size) => *size,
            Image::Foreign(image) => image.size.next_multiple_of(512),
        }
    }

    /// Whether guest data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        match self {
            Image::Raw { .. } | Image::Qed(..) | Image::Foreign(_) => false,
            Image::Qcow2(header) => header.is_encrypted(),
            Image::Luks(..) => true,
        }
    }

    /// Whether its header says that the image is corrupt.
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Image::Qcow2(header) if header.is_corrupt())
    }

    /// Whether guest data lies in another file.
    pub fn has_data_file(&self) -> bool {
        matches!(self, Image::Qcow2(header) if header.geometry().data_file)
    }

    /// That file's name as it is written in the image; one that has none is not usable.
    pub fn data_file(&self) -> Option<&[u8]> {
        match self {
            Image::Qcow2(header) if self.has_data_file() => header.data_file(),
            _ => None,
        }
    }

    /// The backing file's name as it is written in the image.
    pub fn backing_file(&self) -> Option<&[u8]> {
        match self {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => None,
            Image::Qcow2(header) => header.backing_file.as_deref(),
            Image::Qed(_, name) => name.as_deref(),
        }
    }

    /// The name of the backing file's format, where the image says it.
    pub fn backing_format(&self) -> Option<String> {
        self.backing_file()?;
        match self {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => None,
            Image::Qcow2(header) => {
                let name = header.backing_format()?;
                Some(String::from_utf8_lossy(name).into_owned())
            }
            Image::Qed(header, _) => header.backing_is_raw().then(|| "raw".to_owned()),
        }
    }
}

/// A qcow2 image's first cluster, padded with zeroes when the file is
/// shorter.
pub(crate) fn qcow2_first_cluster(file: &dyn ImageFile) -> Result<Vec<u8>> {
    let unreadable = Error::io("cannot read its header");
    let start = match read_up_to(file, 0, 104) {
        Ok(start) => start,
        Err(error) => return Err(unreadable(error)),
    };
    let len = qcow2::Header::len_to_read(&start)?;
    let mut first = vec![0; len];
    file.read_at(&mut first, 0)
        .map_err(Error::io("cannot read its header"))?;
    Ok(first)
}

/// The disk is what is behind the header, in whole sectors.
fn read_luks(file: &dyn ImageFile) -> Result<Image> {
    let len = file.len().map_err(Error::io("cannot read its size"))?;
    let header = Part::all_of(file, len).header().map_err(refused)?;
    let payload = header.payload();
    let rest = len.saturating_sub(payload.offset);
    let size = payload.size.unwrap_or(rest);
    if size > rest {
        return Err(Error::invalid(format!(
            "too short: its header says that the disk has {size} bytes, and the file has {rest}"
        )));
    }
    let size = size - size % u64::from(payload.sector_size);
    Ok(Image::Luks(Box::new(header), size))
}

fn read_qed(file: &dyn ImageFile) -> Result<Image> {
    let read = |at, len| read_up_to(file, at, len).map_err(Error::io("cannot read its header"));
    let header = qed::Header::parse(&read(0, qed::HEADER_LEN as u64)?)?;
    let len = file.len().map_err(Error::io("cannot read its size"))?;
    header.validate_l1(len)?;
    let name = match header.backing_range() {
        None => None,
        Some((at, len)) => {
            let name = read(at, len as u64)?;
            if name.len() < len || name.contains(&0) {
                return Err(Error::invalid("the backing file's name is invalid"));
            }
            Some(name)
        }
    };
    Ok(Image::Qed(header, name))
}
