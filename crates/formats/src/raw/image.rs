//! Raw images by what is known of them.

use crate::Format;
use crate::image_header::ImageHeader;

/// A raw image, which has no header.
#[derive(Clone, Copy, Debug)]
pub struct RawImage {
    /// Length of the file in bytes, which need not be a multiple of a sector.
    pub size: u64,
}

impl ImageHeader for RawImage {
    fn format(&self) -> Format {
        Format::Raw
    }

    fn size(&self) -> u64 {
        self.size.next_multiple_of(512)
    }
}
