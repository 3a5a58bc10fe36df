//! `fathom img map`

use crate::error::{Error, io_error, of};
use fathom_core::{Disk, DiskError};
use fathom_daemon::{AllowedDirs, ImageOpener, StoredImage};
use fathom_formats::image::{ImageDisk, ImageOptions, Mapper};
use fathom_formats::img::{Format, SnapshotName, open_read_only};
use fathom_storage::FileOptions;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    let disk = open(path, options)?;
    disk.activate().map_err(Error::from)?;
    let mapper = disk.mapper().map_err(Error::from);
    let looked = mapper
        .map_err(E::from)
        .and_then(|mut mapper| look(&mut mapper));
    let ended = disk.deactivate().map_err(|error| Error::from(error).into());
    looked.and_then(|found| ended.map(|()| found))
}

fn range(size: u64, options: &MapOptions) -> Range<u64> {
    let len = options.max_len.unwrap_or(u64::MAX);
    options.start..options.start.saturating_add(len).min(size)
}

fn open(path: &Path, options: &MapOptions) -> Result<ImageDisk, Error> {
    let format = match options.format {
        Some(format) => format,
        None => {
            let file = open_read_only(path).map_err(io_error(path, "cannot be opened"))?;
            Format::probe(&file).map_err(of(path))?
        }
    };
    let files = FileOptions {
        read_only: true,
        force_share: options.force_share,
        ..FileOptions::default()
    };
    let opened = || -> Result<ImageDisk, DiskError> {
        let stored = Arc::new(StoredImage::open(path, files.clone())?);
        let dirs = AllowedDirs::new(path, &options.allow_dirs)?;
        let opener = Arc::new(ImageOpener::new(dirs, files));
        let options = ImageOptions {
            read_only: true,
            any_size: true,
            snapshot: options.snapshot.clone(),
            ..ImageOptions::new(format)
        };
        ImageDisk::open(stored, opener, options)
    };
    Ok(opened()?)
}
