//! `fathom img info`: describes an image in the terms and the layout of `qemu-img info`.

mod encryption;
mod foreign;
mod human;
mod json;
mod size;
mod snapshots;
mod sound;
pub(crate) use snapshots::{read_bitmaps, read_snapshots, snapshot_table_bytes};

pub use size::Units;
pub use snapshots::SnapshotList;

use super::Image;
use crate::qcow2::{Header, bitmap::Bitmap, snapshot::Snapshot};
use crate::{Error, Format, RawImage, Result, resolve};
use fathom_files::ImageFile;
use fathom_files::superseded::Superseded;
use std::path::{Path, PathBuf};

/// The kind of storage that holds an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// A regular file.
    File,
    /// A block device.
    Device,
    /// Another protocol by QEMU's name, such as `nbd`. The allocated space is unknown.
    Other(&'static str),
}

/// The description of an image.
#[derive(Clone, Debug)]
pub struct Info {
    /// The path by which the user or the overlay names the image.
    pub path: PathBuf,
    /// The image's header.
    pub image: Image,
    /// Length of the file or device in bytes.
    pub file_len: u64,
    /// Space in bytes that the file takes on its file system; 0 for a device. `None` if the storage
    /// does not report it.
    pub allocated: Option<u64>,
    /// The kind of storage that holds the image.
    pub protocol: Protocol,
    /// The image's internal snapshots.
    pub snapshots: Vec<Snapshot>,
    /// The image's persistent bitmaps.
    pub bitmaps: Vec<Bitmap>,
    /// The LUKS header's description, if the image is encrypted with LUKS.
    pub luks: Option<fathom_luks::Description>,
    /// The resolved path of the backing file, if the image is in a file or device.
    pub full_backing: Option<PathBuf>,
    /// The newer image that has superseded this one, if the file is marked as superseded.
    pub superseded: Option<Superseded>,
}

impl Info {
    /// Reads an image's description. If `format` is `None`, the format is detected from the first
    /// bytes.
    pub fn read(
        path: &Path,
        file: &dyn ImageFile,
        protocol: Protocol,
        format: Option<Format>,
    ) -> Result<Info> {
        let format = match format {
            Some(format) => format,
            None => Format::probe(file)?,
        };
        Info::of(path, file, protocol, Image::read(file, format)?)
    }

    /// Describes an image whose header has been read.
    pub fn of(path: &Path, file: &dyn ImageFile, protocol: Protocol, image: Image) -> Result<Info> {
        let (snapshots, bitmaps) = match &image {
            Image::Qcow2(header) => (read_snapshots(file, header)?, read_bitmaps(file, header)?),
            _ => Default::default(),
        };
        let luks = match &image {
            Image::Qcow2(header) => sound::check(file, header, &bitmaps)?,
            Image::Luks(image) => Some(image.header.describe()),
            Image::Raw(_) | Image::Qed(_) | Image::Foreign(_) => None,
        };
        let is_local = !matches!(protocol, Protocol::Other(_));
        let allocated = is_local.then(|| file.allocated()).transpose();
        let full_backing = image.backing_file().filter(|_| is_local);
        let full_backing = full_backing.and_then(|name| resolve(path, name).ok());
        Ok(Info {
            path: path.to_owned(),
            file_len: file.len().map_err(Error::io("cannot read its size"))?,
            allocated: allocated.map_err(Error::io("cannot read its size"))?,
            protocol,
            image,
            snapshots,
            bitmaps,
            luks,
            full_backing,
            superseded: None,
        })
    }

    /// Describes a disk of `size` bytes that is not an image.
    pub fn of_disk(path: &Path, size: u64, protocol: &'static str) -> Info {
        Info {
            path: path.to_owned(),
            image: Image::Raw(RawImage { size }),
            file_len: size,
            allocated: None,
            protocol: Protocol::Other(protocol),
            snapshots: Vec::new(),
            bitmaps: Vec::new(),
            luks: None,
            full_backing: None,
            superseded: None,
        }
    }

    /// Cluster size in bytes; `None` if the format has no clusters.
    pub fn cluster_size(&self) -> Option<u64> {
        match &self.image {
            Image::Foreign(image) => image.block_size,
            image => image.cluster_size(),
        }
    }

    /// Whether the image must be checked before use.
    pub fn is_dirty(&self) -> bool {
        self.image.needs_check()
    }

    fn is_encrypted(&self) -> bool {
        self.image.is_encrypted()
    }

    fn encryption(&self) -> Option<Vec<encryption::Field>> {
        let in_qcow2 = matches!(self.image, Image::Qcow2(_));
        match &self.luks {
            Some(header) => Some(encryption::fields(header, in_qcow2)),
            None if self.is_encrypted() => Some(encryption::as_of_old()),
            None => None,
        }
    }

    /// QEMU's name for the kind of storage.
    fn protocol(&self) -> &'static str {
        match self.protocol {
            Protocol::File => "file",
            Protocol::Device => "host_device",
            Protocol::Other(name) => name,
        }
    }
}

/// The version by its name in QEMU's option `compat`.
fn compat(header: &Header) -> &'static str {
    match header.version {
        2 => "0.10",
        _ => "1.1",
    }
}

pub(crate) fn flag_names(bitmap: &Bitmap) -> Vec<&'static str> {
    use crate::qcow2::bitmap::{FLAG_AUTO, FLAG_IN_USE};
    let names = [(FLAG_IN_USE, "in-use"), (FLAG_AUTO, "auto")];
    let set = names
        .into_iter()
        .filter(|(flag, _)| bitmap.flags & flag != 0);
    set.map(|(_, name)| name).collect()
}
