//! The backing file that an image will have.

use crate::Format;

/// The name and format of a new backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBacking<'a> {
    /// Name as it is written into the image, which need not be UTF-8.
    pub name: &'a [u8],
    /// Format as it is written into the image.
    pub format: Format,
}
