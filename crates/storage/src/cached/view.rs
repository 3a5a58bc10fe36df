//! The files of a cache, as a keeper provides them.

use super::live::LiveMap;
use super::wire::{Geometry, Identity};
use crate::file::{FileDisk, FileOptions};
use fathom_core::DiskError;
use fathom_files::gate;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The files of a cache. A successor keeper usually provides the same ones.
pub(super) struct View {
    pub(super) geometry: Geometry,
    pub(super) image: Identity,
    pub(super) live: LiveMap,
    pub(super) disk: FileDisk,
    /// The same data through the page cache, for blocking readers.
    pub(super) data: File,
    files: Files,
}

/// Device and inode numbers of the data file and the live map.
type Files = [(u64, u64); 2];

fn identity(data: &File, live: &File) -> io::Result<Files> {
    let of = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
    Ok([of(data)?, of(live)?])
}

impl View {
    /// Makes a view of two files: the data and the live map. The error is one line.
    pub(super) fn new(
        name: &Path,
        (geometry, image): (Geometry, Identity),
        files: Vec<OwnedFd>,
        options: &FileOptions,
    ) -> Result<View, DiskError> {
        let failed = |source| DiskError::Io {
            path: name.to_owned(),
            what: "cannot map its cache",
            source,
        };
        let [data, live]: [File; 2] = <[OwnedFd; 2]>::try_from(files)
            .map_err(|_| failed(io::Error::other("the keeper sent no file descriptors")))?
            .map(File::from);
        let files = identity(&data, &live).map_err(failed)?;
        let live = LiveMap::map(&live, geometry.stripes(), false).map_err(failed)?;
        // Direct I/O is set on the open file description; this one is for readers without aligned
        // buffers.
        let plain = gate::open_again(&data, false).map_err(failed)?;
        let disk = FileDisk::from_file(name, data, options.clone())?;
        Ok(View {
            geometry,
            image,
            live,
            disk,
            data: plain,
            files,
        })
    }

    /// Returns whether these are the same files.
    pub(super) fn is(&self, files: &[OwnedFd]) -> bool {
        let opened: io::Result<Vec<File>> = files
            .iter()
            .map(|file| file.try_clone().map(File::from))
            .collect();
        match opened.as_deref() {
            Ok([data, live]) => identity(data, live).is_ok_and(|other| other == self.files),
            _ => false,
        }
    }
}
