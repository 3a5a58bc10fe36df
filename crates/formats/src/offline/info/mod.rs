//! `fathom img info`: what an image says of itself, in the words and the
//! layout of `qemu-img info`.

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
use crate::{Error, Format, Result, resolve};
use fathom_files::ImageFile;
use fathom_files::superseded::Superseded;
use std::path::{Path, PathBuf};

/// What an image is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// A regular file.
    File,
    /// A block device.
    Device,
    /// What QEMU knows by this name: `nbd`, say. It does not tell how much space is taken.
    Other(&'static str),
}

/// What is known of one image.
#[derive(Clone, Debug)]
pub struct Info {
    /// As the user or the image above names it.
    pub path: PathBuf,
    /// Its header.
    pub image: Image,
    /// Bytes of what it is in.
    pub file_len: u64,
    /// Bytes that a file takes on its disk; 0 for a device. `None`: who has it does not say.
    pub allocated: Option<u64>,
    /// What it is in.
    pub protocol: Protocol,
    /// Internal snapshots.
    pub snapshots: Vec<Snapshot>,
    /// Persistent bitmaps.
    pub bitmaps: Vec<Bitmap>,
    /// How it is encrypted, if it is by LUKS.
    pub luks: Option<fathom_luks::Description>,
    /// Where the backing file's name leads: of an image in a file.
    pub full_backing: Option<PathBuf>,
    /// The newer image that has superseded this one, if its file says so.
    pub superseded: Option<Superseded>,
}

impl Info {
    /// Reads what there is to know. `format` `None` means to look at the first
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

    /// Likewise, of an image whose header is known.
    pub fn of(path: &Path, file: &dyn ImageFile, protocol: Protocol, image: Image) -> Result<Info> {
        let (snapshots, bitmaps) = match &image {
            Image::Qcow2(header) => (read_snapshots(file, header)?, read_bitmaps(file, header)?),
            _ => Default::default(),
        };
        let luks = match &image {
            Image::Qcow2(header) => sound::check(file, header, &bitmaps)?,
            Image::Luks(header, _) => Some(header.describe()),
            Image::Raw { .. } | Image::Qed(..) | Image::Foreign(_) => None,
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

    /// Of a disk of so many bytes that no image is in.
    pub fn of_disk(path: &Path, size: u64, protocol: &'static str) -> Info {
        Info {
            path: path.to_owned(),
            image: Image::Raw { size },
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

    /// Bytes of a cluster; `None` where there are no clusters.
    pub fn cluster_size(&self) -> Option<u64> {
        match &self.image {
            Image::Raw { .. } | Image::Luks(..) => None,
            Image::Foreign(image) => image.block_size,
            Image::Qcow2(header) => Some(header.geometry().cluster_size()),
            Image::Qed(header, _) => Some(header.cluster_size.into()),
        }
    }

    /// The image must be checked before it is used.
    pub fn is_dirty(&self) -> bool {
        match &self.image {
            Image::Raw { .. } | Image::Luks(..) | Image::Foreign(_) => false,
            Image::Qcow2(header) => header.is_dirty(),
            Image::Qed(header, _) => header.needs_check(),
        }
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

    /// QEMU's name for the kind of file.
    fn protocol(&self) -> &'static str {
        match self.protocol {
            Protocol::File => "file",
            Protocol::Device => "host_device",
            Protocol::Other(name) => name,
        }
    }
}

/// The names of versions that QEMU's option `compat` has.
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
