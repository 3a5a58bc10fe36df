//! Opens images at any location.

use crate::error::{Error, of, usage};
use fathom_core::Disk;
use fathom_formats::Format;
use fathom_formats::offline::info::{Info, Protocol};
use fathom_formats::offline::{Image, SnapshotName};
use fathom_formats::served::{Storage, read_foreign};
use fathom_stack::{ImageOpener, KeyRing, StoredImage, seen_from};
use fathom_storage::{Cache, EngineKind, Location, OnSuperseded};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options for opening an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Format of the image. `None`: detect it.
    pub format: Option<Format>,
    /// Open the image for reading only.
    pub read_only: bool,
    /// Allow other processes to write to those of the image's files that are opened read-only.
    pub force_share: bool,
    /// Cache mode of the image's files.
    pub cache: Cache,
    /// I/O engine that reads and writes the image.
    pub engine: EngineKind,
    /// Directories in which the image may name files, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// Path of the external data file, overriding the name in the image. `None`: use that name,
    /// which permits only reading.
    pub data_file: Option<PathBuf>,
    /// Keys that unlock encrypted images.
    pub keys: KeyRing,
    /// Internal snapshot whose disk state is read, instead of the current state.
    pub snapshot: Option<SnapshotName>,
    /// See [`ImageOptions::compress`](fathom_formats::served::ImageOptions::compress).
    pub compress: bool,
    /// See [`ImageOptions::rebasing`](fathom_formats::served::ImageOptions::rebasing).
    pub rebasing: bool,
    /// See [`OwnBitmaps::Kept`](fathom_formats::served::OwnBitmaps::Kept).
    pub keep_bitmaps: bool,
    /// Whether to reconnect to an NBD server that disconnects.
    pub reconnects: bool,
    /// Whether this job brings the image up to date with the newer image that superseded it. If so,
    /// no warning is logged that the image is superseded.
    pub becomes_newest: bool,
}

impl OpenOptions {
    /// Returns the options for reading an image through the page cache.
    pub fn reading(format: Option<Format>) -> OpenOptions {
        OpenOptions {
            format,
            read_only: true,
            force_share: false,
            cache: Cache::Writeback,
            engine: EngineKind::IoUring,
            allow_dirs: Vec::new(),
            data_file: None,
            keys: KeyRing::default(),
            snapshot: None,
            compress: false,
            rebasing: false,
            keep_bitmaps: false,
            reconnects: true,
            becomes_newest: false,
        }
    }

    /// Returns the options for writing to an image.
    pub fn writing(format: Option<Format>) -> OpenOptions {
        OpenOptions {
            read_only: false,
            ..OpenOptions::reading(format)
        }
    }

    /// Returns the options for inspecting an image's metadata.
    pub(crate) fn looking(force_share: bool) -> OpenOptions {
        OpenOptions {
            force_share,
            ..OpenOptions::reading(None)
        }
    }

    /// Returns the options for the storage that contains the image.
    pub(crate) fn storage(&self) -> fathom_storage::OpenOptions {
        fathom_storage::OpenOptions {
            cache: self.cache,
            read_only: self.read_only,
            discard: true,
            growable: true,
            force_share: self.force_share && self.read_only,
            // A server waits for its predecessor to release the locks; an image command fails at
            // once.
            patient: false,
            succeeds: false,
            keeps_lock: true,
            superseded: OnSuperseded::Ignore,
            engine: self.engine,
            workers: 1,
            server_timeout: None,
            server_reconnect: None,
            server_is_sought: self.reconnects,
            server_connections: None,
            base: Default::default(),
            handover_state: Default::default(),
        }
    }
}

/// Opens the storage of an image, to read its structures or, unless the options are read-only, to
/// change them.
pub(crate) fn open(location: &Location, options: &OpenOptions) -> Result<Arc<StoredImage>, Error> {
    let image = StoredImage::open(location, &options.storage())?;
    if !options.read_only && !options.becomes_newest {
        image.warn_if_superseded();
    }
    Ok(Arc::new(image))
}

/// Removes the mark that says a newer image has superseded this one.
pub(crate) fn clear_mark(image: &StoredImage) -> Result<(), Error> {
    let file = image.file_disk().filter(|file| file.mark().is_some());
    let problem = file.and_then(|file| file.clear_mark().err());
    problem.map_or(Ok(()), |problem| Err(usage(image.path(), problem)))
}

/// Opens the storage of an image and locks it until it is closed, as QEMU does.
pub(crate) fn open_locked(
    location: &Location,
    options: &OpenOptions,
) -> Result<Arc<StoredImage>, Error> {
    let image = open(location, options)?;
    image.disk().activate()?;
    Ok(image)
}

/// Returns the format given by the user or, without one, the detected format.
pub(crate) fn format_of(image: &StoredImage, given: Option<Format>) -> Result<Format, Error> {
    match given {
        Some(format) => Ok(format),
        None => Format::probe(image.bytes()).map_err(of(image.path())),
    }
}

/// Reads the header of an open image, and those of its other files if the format has several.
pub(crate) fn header_of(image: &StoredImage, format: Format) -> Result<Image, Error> {
    match format {
        Format::Foreign(kind) => {
            let options = OpenOptions::looking(true).storage();
            let opener = ImageOpener::of(image.location(), &options, &[])?;
            Ok(read_foreign(image, kind, &opener)?)
        }
        format => Image::read(image.bytes(), format).map_err(of(image.path())),
    }
}

/// Describes an open image, which is shown under `name`.
pub(crate) fn info_of(
    name: &Path,
    image: &StoredImage,
    format: Option<Format>,
) -> Result<Info, Error> {
    let location = image.location();
    let protocol = match location.path() {
        Some(_) if image.is_file() => Protocol::File,
        Some(_) => Protocol::Device,
        None => Protocol::Other(location.kind().name),
    };
    let header = header_of(image, format_of(image, format)?)?;
    let info = Info::of(name, image.bytes(), protocol, header).map_err(of(image.path()))?;
    let below = info
        .image
        .backing_file()
        .filter(|_| location.path().is_none());
    let below = below.and_then(|name| seen_from(location, name).ok());
    let info = Info {
        superseded: image.file_disk().and_then(|file| file.mark()),
        ..info
    };
    Ok(match below {
        Some(below) => Info {
            full_backing: Some(below.name()),
            ..info
        },
        None => info,
    })
}

/// Returns the [`Storage::identity`] of what exists at `location`, or `None` if nothing does.
pub(crate) fn identity_of(location: &Location) -> Option<(u64, u64)> {
    match location.path() {
        Some(path) => {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.dev(), metadata.ino()))
        }
        None => Some(open(location, &OpenOptions::looking(true)).ok()?.identity()),
    }
}

/// Opens a disk that cannot contain an image format, such as an NBD server's, as raw. Returns
/// `None` if the location can contain images.
pub(crate) fn open_bare(
    location: &Location,
    options: &OpenOptions,
) -> Result<Option<Arc<dyn Disk>>, Error> {
    if location.kind().images {
        return Ok(None);
    }
    match options.format {
        None | Some(Format::Raw) => Ok(Some(location.open(&options.storage())?.disk)),
        Some(_) => {
            let what = location.kind().what;
            Err(usage(
                &location.name(),
                format!("{what} is a raw disk; pass the format raw, or none"),
            ))
        }
    }
}

/// Returns how many of the `needed` bytes the image's file system lacks. Only the space that is
/// available to unprivileged users counts as free.
pub(crate) fn missing(image: &StoredImage, needed: u64) -> u64 {
    let left = rustix::fs::statvfs(image.path());
    let left = left.map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    needed.saturating_sub(left)
}
