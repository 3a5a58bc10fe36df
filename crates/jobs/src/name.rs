//! What images are called by those above them.

use fathom_formats::Format;
use fathom_formats::offline::backing::NewBacking;

/// An image as it is named in the one above it.
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
