//! Headers of LUKS images.

use super::part::{Part, refused};
use crate::image_header::ImageHeader;
use crate::{Error, Format, Result};
use fathom_files::ImageFile;

/// The header of a LUKS image, and the size of its disk.
#[derive(Clone, Debug)]
pub struct LuksImage {
    /// The LUKS header, version 1 or 2.
    pub header: fathom_luks::Header,
    /// Size of the disk in bytes, in whole sectors of the encryption.
    pub size: u64,
}

impl LuksImage {
    /// Reads a header. The disk is the part of the file after it, in whole sectors.
    pub(super) fn read(file: &dyn ImageFile) -> Result<LuksImage> {
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
        Ok(LuksImage { header, size })
    }
}

impl ImageHeader for LuksImage {
    fn format(&self) -> Format {
        Format::Luks
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn is_encrypted(&self) -> bool {
        true
    }
}
