//! Changes that `fathom img rebase` and `fathom img commit` make to an image's structures: the name
//! of the backing file, and removal of all data.

pub use super::new_backing::NewBacking;
use crate::drivers::driver;
use crate::{Error, Format, Result, qed};
use fathom_files::ImageFile;

/// Sets or removes the backing file of the image in `file`. The last write replaces one sector of
/// the header, so after a power cut the image has the old name or the new one.
pub fn set_backing(
    file: &dyn ImageFile,
    format: Format,
    backing: Option<NewBacking<'_>>,
) -> Result<()> {
    check_name(backing)?;
    driver(format).set_backing(file, backing)
}

/// Sets or removes the backing file of an image that this process is using. Changes nothing else.
pub(crate) fn set_backing_in_use(
    file: &dyn ImageFile,
    format: Format,
    backing: Option<NewBacking<'_>>,
) -> Result<()> {
    check_name(backing)?;
    driver(format).set_backing_in_use(file, backing)
}

/// Checks whether [`set_backing_in_use`] could store `backing`.
pub(crate) fn check_backing_in_use(
    file: &dyn ImageFile,
    format: Format,
    backing: Option<NewBacking<'_>>,
) -> Result<()> {
    check_name(backing)?;
    driver(format).check_backing_in_use(file, backing)
}

fn check_name(backing: Option<NewBacking<'_>>) -> Result<()> {
    match backing.is_some_and(|b| b.name.len() > qed::MAX_BACKING_NAME as usize) {
        true => Err(Error::usage("the backing file's name exceeds 1023 bytes")),
        false => Ok(()),
    }
}

/// Removes all data from the image in `file`, which then reads as its backing file. After a power
/// cut, the image is unchanged or empty. Returns false, without any change, if the format does not
/// support this.
pub fn make_empty(file: &dyn ImageFile, format: Format) -> Result<bool> {
    driver(format).make_empty(file)
}
