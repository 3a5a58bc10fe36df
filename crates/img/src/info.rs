//! `fathom img info`

use crate::error::{Error, io_error, of};
use fathom_formats::img::info as infos;
use fathom_formats::img::{Format, open_read_only};
use fathom_storage::lock_image;
use std::path::Path;

pub use infos::Info;

/// Describes an image, or with `chain` it and all below it. `format` `None`
/// means to look at the image. `force_share` reads it even while others write.
pub fn info(
    path: &Path,
    format: Option<Format>,
    chain: bool,
    force_share: bool,
) -> Result<Vec<Info>, Error> {
    let file = open_read_only(path).map_err(io_error(path, "cannot be opened"))?;
    if !force_share {
        lock_image(path, &file, false)?;
    }
    let infos = match chain {
        true => infos::chain(path, &file, format),
        false => Info::read(path, &file, format).map(|info| vec![info]),
    };
    infos.map_err(of(path))
}
