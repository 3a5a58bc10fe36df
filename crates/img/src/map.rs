//! `fathom img map`

use crate::chain::{Chain, OpenOptions};
use crate::error::Error;
use fathom_formats::image::Mapper;
use fathom_formats::img::{Format, SnapshotName};
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use fathom_formats::image::MapExtent;

/// What to map.
#[derive(Clone, Debug, Default)]
pub struct MapOptions {
    /// None means to look at the image.
    pub format: Option<Format>,
    /// Of the disk, in bytes: where to begin, and how many at most.
    pub start: u64,
    /// See above.
    pub max_len: Option<u64>,
    /// Read the image even while others write.
    pub force_share: bool,
    /// Where backing files may be, besides the image's own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// The disk as an internal snapshot has kept it.
    pub snapshot: Option<SnapshotName>,
}

/// Says of each part of an image's disk where it is. `say` gets the extents in order, with the name
/// of the file, if there is one.
pub fn map<E: From<Error>>(
    path: &Path,
    options: &MapOptions,
    mut say: impl FnMut(&MapExtent, Option<&Path>) -> Result<(), E>,
) -> Result<(), E> {
    with_mapper(path, options, |mapper| {
        let range = range(mapper.size(0), options);
        let (all, paths) = (mapper.depth(), mapper.paths().to_vec());
        for extent in mapper.extents(range, all) {
            let extent = extent.map_err(Error::from)?;
            let path = extent.host.map(|host| &*paths[usize::from(host.file)]);
            say(&extent, path)?;
        }
        Ok(())
    })
}

/// With the map of an image's disk while it is in use. Only its format and what it may open matter
/// of the options.
pub(crate) fn with_mapper<T, E: From<Error>>(
    path: &Path,
    options: &MapOptions,
    look: impl FnOnce(&mut Mapper) -> Result<T, E>,
) -> Result<T, E> {
    let chain = Chain::open(
        path,
        &OpenOptions {
            force_share: options.force_share,
            allow_dirs: options.allow_dirs.clone(),
            snapshot: options.snapshot.clone(),
            ..OpenOptions::reading(options.format)
        },
    )?;
    let looked = match chain.disk().mapper() {
        Ok(mut mapper) => look(&mut mapper),
        Err(error) => Err(Error::from(error).into()),
    };
    let ended = chain.close();
    looked.and_then(|found| Ok(ended.map(|()| found)?))
}

fn range(size: u64, options: &MapOptions) -> Range<u64> {
    let len = options.max_len.unwrap_or(u64::MAX);
    options.start..options.start.saturating_add(len).min(size)
}
