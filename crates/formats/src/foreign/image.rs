//! Descriptions of foreign images as headers.

use crate::Format;
use crate::image_header::ImageHeader;
use fathom_foreign::Description;

impl ImageHeader for Description {
    fn format(&self) -> Format {
        Format::Foreign(self.kind)
    }

    fn size(&self) -> u64 {
        self.size.next_multiple_of(512)
    }
}
