//! `fathom img measure`

use crate::create::CreateOptions;
use crate::error::{Error, of};
use crate::map::{MapOptions, with_extents};
use crate::open::{OpenOptions, info_of, open};
use fathom_formats::offline::Image;
use fathom_formats::offline::measure as measures;
use fathom_storage::Location;

pub use measures::Measure;

/// Computes the size of the image into which the disk at `location` would be converted. The disk
/// is opened with the options of [`crate::map`].
pub fn measure(
    location: &Location,
    source: &MapOptions,
    target: &CreateOptions,
) -> Result<Measure, Error> {
    let told = of(&location.name());
    target.validate().map_err(&told)?;
    with_extents(location, source, |size, extents, _| {
        let source = measures::Source {
            data: measures::data_clusters(extents, target.cluster_size)?,
            bitmaps: bitmaps(location, source)?,
        };
        measures::measure(target, size, Some(&source)).map_err(&told)
    })
}

/// Computes the size of an image of an empty disk.
pub fn measure_empty(size: u64, target: &CreateOptions) -> Result<Measure, fathom_formats::Error> {
    target.validate()?;
    measures::measure(target, size, None)
}

fn bitmaps(
    location: &Location,
    source: &MapOptions,
) -> Result<Option<Vec<fathom_formats::qcow2::bitmap::Bitmap>>, Error> {
    if !location.kind().images {
        return Ok(None);
    }
    // `with_extents` has locked the image already.
    let image = open(location, &OpenOptions::looking(true))?;
    let info = info_of(&location.name(), &image, source.format)?;
    Ok(match &info.image {
        Image::Qcow2(header) if header.version >= 3 => Some(info.bitmaps),
        _ => None,
    })
}
