//! `fathom img measure`

use crate::create::CreateOptions;
use crate::error::{Error, io_error, of};
use crate::map::{MapOptions, with_extents};
use crate::source::nbd_uri;
use fathom_formats::offline::info::Info;
use fathom_formats::offline::measure as measures;
use fathom_formats::offline::{Image, open_read_only};
use std::path::Path;

pub use measures::Measure;

/// Measures the image that the disk in `path` would be converted into, opened as the options of
/// [`crate::map`] say.
pub fn measure(path: &Path, source: &MapOptions, target: &CreateOptions) -> Result<Measure, Error> {
    target.validate().map_err(of(path))?;
    with_extents(path, source, |size, extents, _| {
        let source = measures::Source {
            data: measures::data_clusters(extents, target.cluster_size)?,
            bitmaps: bitmaps(path, source)?,
        };
        measures::measure(target, size, Some(&source)).map_err(of(path))
    })
}

/// Measures an image of an empty disk.
pub fn measure_empty(size: u64, target: &CreateOptions) -> Result<Measure, fathom_formats::Error> {
    target.validate()?;
    measures::measure(target, size, None)
}

fn bitmaps(
    path: &Path,
    source: &MapOptions,
) -> Result<Option<Vec<fathom_formats::qcow2::bitmap::Bitmap>>, Error> {
    if nbd_uri(path.as_os_str()).is_some() {
        return Ok(None);
    }
    let file = open_read_only(path).map_err(io_error(path, "cannot be opened"))?;
    let info = Info::read(path, &file, source.format).map_err(of(path))?;
    Ok(match &info.image {
        Image::Qcow2(header) if header.version >= 3 => Some(info.bitmaps),
        _ => None,
    })
}
