//! Names of backing images.

use fathom_formats::Format;
use fathom_formats::offline::backing::NewBacking;

/// The name of an image as the image above it records it.
pub struct Name {
    pub name: Vec<u8>,
    pub format: Format,
}

impl Name {
    pub fn backing(&self) -> NewBacking<'_> {
        NewBacking {
            name: &self.name,
            format: self.format,
        }
    }
}
