//! `fathom img map`

use crate::error::Error;
use crate::open::OpenOptions;
use crate::source::Source;
use fathom_formats::Format;
use fathom_formats::offline::SnapshotName;
use fathom_stack::{Job, KeyRing};
use fathom_storage::Location;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use fathom_formats::served::MapExtent;

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
    /// What unlocks images that are encrypted.
    pub keys: KeyRing,
}

/// Says of each part of the disk in an image, or of an NBD URI, where it is. `say` gets the extents in
/// order, with the name of the file, if there is one.
pub fn map<E: From<Error>>(
    location: &Location,
    options: &MapOptions,
    mut say: impl FnMut(&MapExtent, Option<&Path>) -> Result<(), E>,
) -> Result<(), E> {
    with_extents(location, options, |_, extents, paths| {
        for extent in extents {
            let extent = extent?;
            let path = extent.host.map(|host| &*paths[usize::from(host.file)]);
            say(&extent, path)?;
        }
        Ok(())
    })
}

/// With the map of a disk, its size, and the names of its files.
pub(crate) fn with_extents<T, E: From<Error>>(
    location: &Location,
    options: &MapOptions,
    look: impl FnOnce(
        u64,
        &mut dyn Iterator<Item = Result<MapExtent, Error>>,
        &[PathBuf],
    ) -> Result<T, E>,
) -> Result<T, E> {
    let open = OpenOptions {
        force_share: options.force_share,
        allow_dirs: options.allow_dirs.clone(),
        snapshot: options.snapshot.clone(),
        keys: options.keys.clone(),
        ..OpenOptions::reading(options.format)
    };
    let mut job = Job::default();
    let disk = Source::at(location.clone(), open)?.open(&mut job)?;
    let size = disk.size();
    let looked = disk.extents(&job, range(size, options), |extents, paths| {
        look(size, extents, paths)
    });
    let ended = disk.close();
    looked.and_then(|found| Ok(ended.map(|()| found)?))
}

fn range(size: u64, options: &MapOptions) -> Range<u64> {
    let len = options.max_len.unwrap_or(u64::MAX);
    options.start..options.start.saturating_add(len).min(size)
}
