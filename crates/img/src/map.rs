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

/// Options for mapping a disk.
#[derive(Clone, Debug, Default)]
pub struct MapOptions {
    /// Format of the image. `None`: detect it.
    pub format: Option<Format>,
    /// Offset in the disk at which the map begins, in bytes.
    pub start: u64,
    /// Maximum length of the mapped range, in bytes.
    pub max_len: Option<u64>,
    /// Read the image even while other processes write to it.
    pub force_share: bool,
    /// Directories in which backing files may be, besides the image's own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// Internal snapshot whose disk state is mapped, instead of the current state.
    pub snapshot: Option<SnapshotName>,
    /// Keys that unlock encrypted images.
    pub keys: KeyRing,
}

/// Reports where each part of a disk is stored. The disk is in an image or at an NBD URI. `say`
/// receives the extents in order, each with the name of its file, if there is one.
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

/// Calls `look` with the size of a disk, its map, and the names of its files.
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
