//! `fathom img measure`: computes the file size of a new image.

mod result;

pub use result::{Measure, Source};

use super::create::Options;
use crate::drivers::driver;
use crate::served::MapExtent;
use crate::{Error, Result};

/// Measures a new image with these options for a disk of `size` bytes. Without a source, the image
/// is empty. With a backing file, all data is counted, because the data shared with the source is
/// unknown.
pub fn measure(options: &Options, size: u64, source: Option<&Source>) -> Result<Measure> {
    let size = size
        .checked_next_multiple_of(512)
        .filter(|size| *size <= i64::MAX as u64)
        .ok_or_else(|| Error::usage("the size exceeds the limit"))?;
    driver(options.format).measure(options, size, source)
}

/// Returns the total size in bytes of all clusters of `cluster_size` bytes (a power of two) that
/// contain data. `extents` must cover the whole disk.
pub fn data_clusters<E>(
    extents: impl Iterator<Item = std::result::Result<MapExtent, E>>,
    cluster_size: u64,
) -> std::result::Result<u64, E> {
    let (mut bytes, mut end) = (0, 0);
    for extent in extents {
        let extent = extent?;
        if extent.data && !extent.zero {
            let start = (extent.start & !(cluster_size - 1)).max(end);
            end = (extent.start + extent.len).next_multiple_of(cluster_size);
            bytes += end - start.min(end);
        }
    }
    Ok(bytes)
}
