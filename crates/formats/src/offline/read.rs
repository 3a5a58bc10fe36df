//! Reads image headers.

use super::SnapshotName;
use super::info::read_snapshots;
use crate::foreign::describe;
use crate::luks::{Part, refused};
use crate::{Error, Format, Result, qcow2, qed};
use fathom_files::{ImageFile, read_up_to};

/// An image's header.
#[derive(Clone, Debug)]
pub enum Image {
    /// A raw image, which has no header; the disk's size in bytes.
    Raw { size: u64 },
    /// A qcow2 image. Boxed because the header is large.
    Qcow2(Box<qcow2::Header>),
    /// A QED image, with the name of its backing file.
    Qed(qed::Header, Option<Vec<u8>>),
    /// A LUKS image, with the disk's size in bytes.
    Luks(Box<fathom_luks::Header>, u64),
    /// A foreign image, with its description.
    Foreign(Box<fathom_foreign::Description>),
}

impl Image {
    /// Whether the image can have bitmaps.
    pub fn can_have_bitmaps(&self) -> bool {
        matches!(self, Image::Qcow2(header) if header.version >= 3)
    }

    /// Reads the header of an image in this format.
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

    /// Returns the header of the image as it was when this internal snapshot was taken.
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

    /// The image's format.
    pub fn format(&self) -> Format {
        match self {
            Image::Raw { .. } => Format::Raw,
            Image::Qcow2(_) => Format::Qcow2,
            Image::Qed(..) => Format::Qed,
            Image::Luks(..) => Format::Luks,
            Image::Foreign(image) => Format::Foreign(image.kind),
        }
    }

    /// The disk's size in bytes, in whole sectors, as QEMU computes it.
    pub fn size(&self) -> u64 {
        match self {
            Image::Raw { size } => size.next_multiple_of(512),
            Image::Qcow2(header) => header.size & !511,
            Image::Qed(header, _) => header.image_size,
            Image::Luks(_, size) => *size,
            Image::Foreign(image) => image.size.next_multiple_of(512),
        }
    }

    /// Whether tables say where the data is. The disk of another image is a part of its file, or
    /// what its storage makes of the file.
    pub fn has_tables(&self) -> bool {
        self.format().has_tables()
    }

    /// The size in bytes of a cluster, the unit that the tables map. `None`: it has no tables.
    pub fn cluster_size(&self) -> Option<u64> {
        match self {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => None,
            Image::Qcow2(header) => Some(header.geometry().cluster_size()),
            Image::Qed(header, _) => Some(header.cluster_size.into()),
        }
    }

    /// The number of bytes that are allocated in the file at once: a cluster, or a subcluster where
    /// clusters have subclusters.
    pub fn allocation_unit(&self) -> u64 {
        match self {
            Image::Qcow2(header) => header.geometry().subcluster_size(),
            _ => self.cluster_size().unwrap_or(512),
        }
    }

    /// Whether the header says that the image was not closed properly and must be checked.
    pub fn needs_check(&self) -> bool {
        match self {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => false,
            Image::Qcow2(header) => header.is_dirty(),
            Image::Qed(header, _) => header.needs_check(),
        }
    }

    /// The number of internal snapshots.
    pub fn snapshots(&self) -> u32 {
        match self {
            Image::Qcow2(header) => header.snapshots,
            _ => 0,
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

    /// Whether the header marks the image as corrupt.
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Image::Qcow2(header) if header.is_corrupt())
    }

    /// Whether guest data is in an external data file.
    pub fn has_data_file(&self) -> bool {
        matches!(self, Image::Qcow2(header) if header.geometry().data_file)
    }

    /// The external data file's name as stored in the image. An image that needs a data file but
    /// does not name one is not usable.
    pub fn data_file(&self) -> Option<&[u8]> {
        match self {
            Image::Qcow2(header) if self.has_data_file() => header.data_file(),
            _ => None,
        }
    }

    /// The backing file's name as stored in the image.
    pub fn backing_file(&self) -> Option<&[u8]> {
        match self {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => None,
            Image::Qcow2(header) => header.backing_file.as_deref(),
            Image::Qed(_, name) => name.as_deref(),
        }
    }

    /// The name of the backing file's format, if the image stores it.
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

/// Reads a qcow2 image's first cluster, padded with zeroes if the file is shorter.
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

/// Reads a LUKS header. The disk is the part of the file after the header, in whole sectors.
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
