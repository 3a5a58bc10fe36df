//! QED images by their headers.

use super::{HEADER_LEN, Header};
use crate::image_header::ImageHeader;
use crate::{Error, Format, Result};
use fathom_files::{ImageFile, read_up_to};

/// The header of a QED image, and the name of its backing file.
#[derive(Clone, Debug)]
pub struct QedImage {
    /// The header, whose values are valid.
    pub header: Header,
    /// The name as stored in the image.
    pub backing_file: Option<Vec<u8>>,
}

impl QedImage {
    /// Reads and checks the header of the image in `file`.
    pub(crate) fn read(file: &dyn ImageFile) -> Result<QedImage> {
        let read = |at, len| read_up_to(file, at, len).map_err(Error::io("cannot read its header"));
        let header = Header::parse(&read(0, HEADER_LEN as u64)?)?;
        let len = file.len().map_err(Error::io("cannot read its size"))?;
        header.validate_l1(len)?;
        let backing_file = match header.backing_range() {
            None => None,
            Some((at, len)) => {
                let name = read(at, len as u64)?;
                if name.len() < len || name.contains(&0) {
                    return Err(Error::invalid("the backing file's name is invalid"));
                }
                Some(name)
            }
        };
        Ok(QedImage {
            header,
            backing_file,
        })
    }
}

impl ImageHeader for QedImage {
    fn format(&self) -> Format {
        Format::Qed
    }

    fn size(&self) -> u64 {
        self.header.image_size
    }

    fn cluster_size(&self) -> Option<u64> {
        Some(self.header.cluster_size.into())
    }

    fn needs_check(&self) -> bool {
        self.header.needs_check()
    }

    fn backing_file(&self) -> Option<&[u8]> {
        self.backing_file.as_deref()
    }

    /// The header records raw or nothing.
    fn backing_format(&self) -> Option<String> {
        self.backing_file()?;
        self.header.backing_is_raw().then(|| "raw".to_owned())
    }
}
