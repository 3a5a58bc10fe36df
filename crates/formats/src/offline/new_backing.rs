//! The backing file that an image will have.

use crate::Format;

/// The name and format of a new backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBacking<'a> {
    pub name: &'a [u8],
    pub format: Format,
}
