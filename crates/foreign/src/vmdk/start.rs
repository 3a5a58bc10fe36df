//! Which files an image has.

use super::descriptor::{self, Descriptor};
use super::{cowd, sparse};
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::source::Source;

/// What is read of a descriptor: as much as QEMU does.
const MAX_LEN: u64 = (1 << 20) - 1;

/// The descriptor of an image in several files: the text of `main`, or one
/// inside of it that stands for the whole file. `None`: `main` has its data.
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
