//! Opening images, wherever they are.

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

/// How to open an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// None: what it looks like.
    pub format: Option<Format>,
    pub read_only: bool,
    /// What is only read, of it and of the files that it names, may be written to by other processes.
    pub force_share: bool,
    pub cache: Cache,
    pub engine: EngineKind,
    /// Where the files may be that the image names; none: the image's own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file, whatever the image calls it; none: what it calls it, to be read only.
    pub data_file: Option<PathBuf>,
    /// What unlocks images that are encrypted.
    pub keys: KeyRing,
    /// The state that an internal snapshot has kept.
    pub snapshot: Option<SnapshotName>,
    /// See [`ImageOptions::compress`](fathom_formats::served::ImageOptions::compress).
    pub compress: bool,
    /// See [`ImageOptions::rebasing`](fathom_formats::served::ImageOptions::rebasing).
    pub rebasing: bool,
    /// See [`OwnBitmaps::Kept`](fathom_formats::served::OwnBitmaps::Kept).
    pub keep_bitmaps: bool,
    /// Whether an NBD server that is away is looked for again.
    pub reconnects: bool,
    /// The image gets all that a newer one has, which has superseded it.
    pub becomes_newest: bool,
}

impl OpenOptions {
    /// For an image that is read, through the page cache.
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

    /// For an image that is written to.
    pub fn writing(format: Option<Format>) -> OpenOptions {
        OpenOptions {
            read_only: false,
            ..OpenOptions::reading(format)
        }
    }

    /// For an image that is only looked at.
    pub(crate) fn looking(force_share: bool) -> OpenOptions {
        OpenOptions {
            force_share,
            ..OpenOptions::reading(None)
        }
    }

    /// Those of what the image is in.
    pub(crate) fn storage(&self) -> fathom_storage::OpenOptions {
        fathom_storage::OpenOptions {
            cache: self.cache,
            read_only: self.read_only,
            discard: true,
            growable: true,
            force_share: self.force_share && self.read_only,
            // Unlike a server, which takes over from a predecessor, a tool does not wait.
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
            legacy: Default::default(),
        }
    }
}

/// Opens what an image is in, for reading its structures or, as the options say, changing them.
pub(crate) fn open(location: &Location, options: &OpenOptions) -> Result<Arc<StoredImage>, Error> {
    let image = StoredImage::open(location, &options.storage())?;
    if !options.read_only && !options.becomes_newest {
        image.warn_if_superseded();
    }
    Ok(Arc::new(image))
}

/// The image is a disk's again, and no newer one has superseded it.
pub(crate) fn clear_mark(image: &StoredImage) -> Result<(), Error> {
    let file = image.file_disk().filter(|file| file.mark().is_some());
    let problem = file.and_then(|file| file.clear_mark().err());
    problem.map_or(Ok(()), |problem| Err(usage(image.path(), problem)))
}

/// Likewise, and locks it until it is closed, as QEMU does.
pub(crate) fn open_locked(
    location: &Location,
    options: &OpenOptions,
) -> Result<Arc<StoredImage>, Error> {
    let image = open(location, options)?;
    image.disk().activate()?;
    Ok(image)
}

/// Its format: as the user says, or what it looks like.
pub(crate) fn format_of(image: &StoredImage, given: Option<Format>) -> Result<Format, Error> {
    match given {
        Some(format) => Ok(format),
        None => Format::probe(image.bytes()).map_err(of(image.path())),
    }
}

/// Of an image that is open, and of the files that it is in, if there are others.
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

/// What there is to know of an image that is open; it is called `name`.
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

/// What [`Storage::identity`] is of what is there now, if anything is.
pub(crate) fn identity_of(location: &Location) -> Option<(u64, u64)> {
    match location.path() {
        Some(path) => {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.dev(), metadata.ino()))
        }
        None => Some(open(location, &OpenOptions::looking(true)).ok()?.identity()),
    }
}

/// Opens a disk that no image of a format can be in, an NBD server's say, as raw. None: images can be there.
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

/// What its file system lacks for `needed` bytes of a file; what it has left counts, as far as anybody
/// may use it.
pub(crate) fn missing(image: &StoredImage, needed: u64) -> u64 {
    let left = rustix::fs::statvfs(image.path());
    let left = left.map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    needed.saturating_sub(left)
}
