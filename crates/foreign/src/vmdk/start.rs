//! Determines the files of an image.

use super::descriptor::{self, Descriptor};
use super::{cowd, sparse};
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::source::Source;

/// Maximum number of bytes of a descriptor that are read, as in QEMU.
const MAX_LEN: u64 = (1 << 20) - 1;

/// Returns the descriptor of an image in several files.
///
/// The descriptor is the text of `main`, or it is inside a sparse file that contains nothing else.
/// Returns `None` if `main` contains the data.
pub fn descriptor(main: &Source) -> Result<Option<Descriptor>> {
    let start = main.up_to(0, Kind::START)?;
    let (at, len) = match Kind::of_start(&start) {
        Some(Kind::Vmdk) if start.starts_with(cowd::MAGIC) => {
            return Err(Error::unsupported(sparse::IS_A_PART));
        }
        Some(Kind::Vmdk) if start.starts_with(sparse::MAGIC) => {
            match sparse::only_descriptor(main)? {
                Some(place) => place,
                None => return Ok(None),
            }
        }
        Some(Kind::Vmdk) => (0, main.len),
        _ => return Err(Error::Not(Kind::Vmdk)),
    };
    let text = main.up_to(at, len.min(MAX_LEN) as usize)?;
    let descriptor = descriptor::parse(&text)?;
    descriptor.check()?;
    Ok(Some(descriptor))
}
