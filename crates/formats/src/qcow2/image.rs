//! Headers of qcow2 images in files.

use super::Header;
use crate::image_header::ImageHeader;
use crate::{Error, Format, Result};
use fathom_files::{ImageFile, read_up_to};

/// Reads an image's first cluster, padded with zeroes if the file is shorter.
pub(crate) fn first_cluster(file: &dyn ImageFile) -> Result<Vec<u8>> {
    let unreadable = Error::io("cannot read its header");
    let start = match read_up_to(file, 0, 104) {
        Ok(start) => start,
        Err(error) => return Err(unreadable(error)),
    };
    let len = Header::len_to_read(&start)?;
    let mut first = vec![0; len];
    file.read_at(&mut first, 0)
        .map_err(Error::io("cannot read its header"))?;
    Ok(first)
}

impl ImageHeader for Header {
    fn format(&self) -> Format {
        Format::Qcow2
    }

    fn size(&self) -> u64 {
        self.size & !511
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(self.geometry().cluster_size())
    }

    fn allocation_unit(&self) -> u64 {
        self.geometry().subcluster_size()
    }

    fn needs_check(&self) -> bool {
        self.is_dirty()
    }

    fn is_corrupt(&self) -> bool {
        Header::is_corrupt(self)
    }

    fn is_encrypted(&self) -> bool {
        Header::is_encrypted(self)
    }

    fn snapshots(&self) -> u32 {
        self.snapshots
    }

    fn can_have_bitmaps(&self) -> bool {
        self.version >= 3
    }

    fn has_data_file(&self) -> bool {
        self.geometry().data_file
    }

    fn data_file(&self) -> Option<&[u8]> {
        Header::data_file(self).filter(|_| self.geometry().data_file)
    }

    fn backing_file(&self) -> Option<&[u8]> {
        self.backing_file.as_deref()
    }

    fn backing_format(&self) -> Option<String> {
        let name = self
            .backing_file
            .as_ref()
            .and(Header::backing_format(self))?;
        Some(String::from_utf8_lossy(name).into_owned())
    }
}
