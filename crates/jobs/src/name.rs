//! Names of backing images.

use fathom_formats::Format;
use fathom_formats::offline::backing::NewBacking;

/// The name of an image as the image above it records it.
pub struct Name {
    /// Path of the image in the form that the image above stores: any bytes, possibly relative.
    pub name: Vec<u8>,
    /// Format of the image that has this name.
    pub format: Format,
}

impl Name {
    /// Returns the name in the form that the offline tools write to an image.
    pub fn backing(&self) -> NewBacking<'_> {
        NewBacking {
            name: &self.name,
            format: self.format,
        }
    }
}
