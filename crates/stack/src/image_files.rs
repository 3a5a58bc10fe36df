//! Image files as the qcow2 and QED formats use them.

use crate::confined::{AllowedDirs, data_file, no_data_file};
use fathom_core::{Disk, DiskError};
use fathom_files::{FileId, ImageFile};
use fathom_formats::resolve;
use fathom_formats::served::{EndGuard, ImageDisk, ImageOptions, Opener, Storage};
use fathom_storage::{FileDisk, FileOptions, Location, OnSuperseded, OpenOptions};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The open storage of an image, mostly a file.
pub struct StoredImage {
    location: Location,
    /// The name of the location.
    path: PathBuf,
    disk: Arc<dyn Disk>,
    /// The disk as a file, if it is one.
    file: Option<Arc<FileDisk>>,
    /// The same bytes as those of `disk`.
    ///
    /// A file is accessed through the page cache here, however `disk` accesses it. The kernel keeps
    /// both views coherent.
    bytes: Arc<dyn ImageFile>,
    identity: (u64, u64),
    file_id: FileId,
}

impl StoredImage {
    /// Opens an image that the user names.
    pub fn open(location: &Location, options: &OpenOptions) -> Result<StoredImage, DiskError> {
        if let Some(path) = location.path() {
            return StoredImage::in_file(path, options.into());
        }
        let options = OpenOptions {
            growable: true,
            ..options.clone()
        };
        let opened = location.open(&options)?;
        let path = location.name();
        let (Some(bytes), Some(identity)) = (opened.bytes, opened.identity) else {
            let problem = "this kind of storage holds only raw images".into();
            return Err(DiskError::Unusable { path, problem });
        };
        let mut hasher = DefaultHasher::new();
        identity.hash(&mut hasher);
        Ok(StoredImage {
            disk: opened.disk,
            file: None,
            bytes,
            // No device has this number.
            identity: (u64::MAX, hasher.finish()),
            file_id: FileId::Named(identity),
            path,
            location: location.clone(),
        })
    }

    fn in_file(path: &Path, options: FileOptions) -> Result<StoredImage, DiskError> {
        let options = FileOptions {
            growable: true,
            ..options
        };
        StoredImage::new(path, FileDisk::open(path, options)?)
    }

    /// Uses an open file with the name `path`.
    pub fn from_file(
        path: &Path,
        file: File,
        options: FileOptions,
    ) -> Result<StoredImage, DiskError> {
        let options = FileOptions {
            growable: true,
            ..options
        };
        StoredImage::new(path, FileDisk::from_file(path, file, options)?)
    }

    fn new(path: &Path, disk: FileDisk) -> Result<StoredImage, DiskError> {
        let file = disk.reopen()?;
        let file_id = disk.id().clone();
        let metadata = file.metadata().map_err(|source| DiskError::Io {
            path: path.to_owned(),
            what: "cannot read the file's attributes",
            source,
        })?;
        let disk = Arc::new(disk);
        Ok(StoredImage {
            location: Location::file(path),
            path: path.to_owned(),
            disk: disk.clone(),
            file: Some(disk),
            bytes: Arc::new(file),
            identity: (metadata.dev(), metadata.ino()),
            file_id,
        })
    }

    /// Returns the location of the image.
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// Returns whether the image grows when it is written, so that it is no device.
    pub fn is_file(&self) -> bool {
        self.bytes.grows()
    }

    /// Warns before a write to an image that a newer one has superseded.
    pub fn warn_if_superseded(&self) {
        if let Some(mark) = self.file.as_ref().and_then(|file| file.mark()) {
            tracing::warn!(
                "{}: superseded by {} (disk '{}'); that image will not contain what is written \
                 here",
                self.path.display(),
                mark.image,
                mark.disk
            );
        }
    }

    /// Returns the file to which requests go, if it is one.
    pub fn file_disk(&self) -> Option<&Arc<FileDisk>> {
        self.file.as_ref()
    }
}

/// Returns the location that an image at `location` calls `name`, whether or not it is allowed.
pub fn seen_from(location: &Location, name: &[u8]) -> Result<Location, DiskError> {
    let unusable = |problem| DiskError::Unusable {
        path: location.name(),
        problem,
    };
    if let Some(path) = location.path() {
        let named = resolve(path, name).map_err(|error| unusable(error.to_string()))?;
        return Ok(Location::file(named));
    }
    let shown = String::from_utf8_lossy(name);
    location.beside(&shown).ok_or_else(|| {
        unusable(format!(
            "it names {}, and may only name a file in the same place: {}",
            shown.escape_debug(),
            location.kind().form
        ))
    })
}

impl Storage for StoredImage {
    fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> &dyn ImageFile {
        &*self.bytes
    }

    fn identity(&self) -> (u64, u64) {
        self.identity
    }

    fn file_id(&self) -> FileId {
        self.file_id.clone()
    }

    fn is_at(&self, path: &Path) -> bool {
        match self.file_disk() {
            Some(_) => FileId::at(path).is_ok_and(|found| found == self.file_id),
            None => self.path == path,
        }
    }

    fn guard_end(&self, guard: EndGuard) {
        if let Some(disk) = self.file_disk() {
            disk.guard_end(guard);
        }
    }
}

/// Opens the files that images name, if that is allowed, and the user's data file.
pub struct ImageOpener {
    reach: Reach,
    data_file: Option<DataFile>,
    data_disk: Arc<OnceLock<Arc<FileDisk>>>,
    base: Option<Base>,
    options: FileOptions,
}

/// The backing image of one image, both named by the user, which overrides the name in the image.
struct Base {
    image: PathBuf,
    location: Location,
    options: OpenOptions,
    is_used: AtomicBool,
}

/// The locations that an image may name.
enum Reach {
    /// Files in the allowed directories.
    Files(AllowedDirs),
    /// Other images in the same storage, opened with the same options.
    Beside(Location, OpenOptions),
}

/// The external data file of one image, both named by the user.
struct DataFile {
    image: PathBuf,
    path: PathBuf,
}

impl ImageOpener {
    /// Creates an opener with the options of the image itself.
    pub fn new(dirs: AllowedDirs, options: FileOptions) -> ImageOpener {
        ImageOpener {
            reach: Reach::Files(dirs),
            data_file: None,
            data_disk: Arc::default(),
            base: None,
            options,
        }
    }

    /// Creates an opener for an image that the user names, which may be a file or not.
    ///
    /// `more` are directories, besides the image's own, of files that it may name.
    pub fn of(
        location: &Location,
        options: &OpenOptions,
        more: &[PathBuf],
    ) -> Result<ImageOpener, DiskError> {
        let file_options = FileOptions::from(options);
        let reach = match location.path() {
            Some(path) => Reach::Files(AllowedDirs::new(path, more)?),
            None => Reach::Beside(location.clone(), options.clone()),
        };
        Ok(ImageOpener {
            reach,
            data_file: None,
            data_disk: Arc::default(),
            base: None,
            options: file_options,
        })
    }

    /// Sets the backing image of `image` that the user has given, if any, and its options.
    ///
    /// A given backing image overrides the name in the image.
    pub fn with_base(
        self,
        image: &Path,
        base: Option<Location>,
        options: &OpenOptions,
    ) -> ImageOpener {
        let base = base.map(|location| Base {
            image: image.to_owned(),
            location,
            options: OpenOptions {
                read_only: true,
                ..options.clone()
            },
            is_used: AtomicBool::new(false),
        });
        ImageOpener { base, ..self }
    }

    /// Sets the data file of `image` that the user has given, if any, which overrides the name in
    /// the image.
    pub fn with_data_file(self, image: &Path, given: Option<&Path>) -> ImageOpener {
        let data_file = given.map(|path| DataFile {
            image: image.to_owned(),
            path: path.to_owned(),
        });
        ImageOpener { data_file, ..self }
    }

    /// Returns the cell that receives the data file's disk once it is open.
    pub(crate) fn data_disk(&self) -> Arc<OnceLock<Arc<FileDisk>>> {
        self.data_disk.clone()
    }

    /// Opens an image and the files that it names.
    pub fn open_disk(
        self,
        image: Arc<StoredImage>,
        options: ImageOptions,
    ) -> Result<ImageDisk, DiskError> {
        let opener = Arc::new(self);
        let disk = ImageDisk::open(image, opener.clone(), options)?;
        if let Some(base) = &opener.base
            && !base.is_used.load(Ordering::Relaxed)
        {
            return Err(DiskError::Unusable {
                path: base.image.clone(),
                problem: format!(
                    "no backing file; --base applies to images that have one ('fathom img create \
                     -b {}' creates one)",
                    base.location.remote().unwrap_or_default()
                ),
            });
        }
        match &opener.data_file {
            Some(given) if !disk.has_file(&given.path) => Err(no_data_file(&given.image)),
            _ => Ok(disk),
        }
    }

    /// Opens the file that `image` calls `name`, for reading, or also for writing.
    pub fn open_named(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<StoredImage, DiskError> {
        if let Some(base) = &self.base {
            if image == base.image {
                base.is_used.store(true, Ordering::Relaxed);
                return StoredImage::open(&base.location, &base.options);
            }
            if image == base.location.name() {
                let problem = "it names a backing file, and a base image must have none; flatten it with \
                     'fathom img convert'";
                return Err(DiskError::Unusable {
                    path: image.to_owned(),
                    problem: problem.into(),
                });
            }
        }
        match &self.reach {
            Reach::Files(dirs) => {
                let ((path, file), options) = match writable {
                    // Users wait meanwhile, so a locked file is an error at once.
                    true => {
                        let options = FileOptions {
                            patient: false,
                            ..self.writable()
                        };
                        (dirs.open_writable(image, name)?, options)
                    }
                    false => (dirs.open(image, name)?, self.read_only()),
                };
                StoredImage::from_file(&path, file, options)
            }
            Reach::Beside(location, options) => {
                let options = OpenOptions {
                    read_only: !writable,
                    ..options.clone()
                };
                StoredImage::open(&seen_from(location, name)?, &options)
            }
        }
    }

    fn writable(&self) -> FileOptions {
        FileOptions {
            force_share: false,
            // Lower images are superseded by upper ones, and only jobs write to them.
            superseded: OnSuperseded::Ignore,
            ..self.options.clone()
        }
    }

    fn read_only(&self) -> FileOptions {
        FileOptions {
            read_only: true,
            ..self.options.clone()
        }
    }
}

impl Opener for ImageOpener {
    fn open(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<Arc<dyn Storage>, DiskError> {
        Ok(Arc::new(self.open_named(image, name, writable)?))
    }

    fn open_data_file(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<Arc<dyn Storage>, DiskError> {
        let given = self.data_file.as_ref().filter(|given| given.image == image);
        let given = given.map(|given| &*given.path);
        let options = match (given, writable) {
            (None, false) => return self.open(image, name, false),
            (Some(_), false) => self.read_only(),
            (_, true) => self.writable(),
        };
        let path = data_file(image, name, given)?;
        let file = StoredImage::in_file(path, options)?;
        if let (Some(_), Some(disk)) = (given, file.file_disk()) {
            let _ = self.data_disk.set(disk.clone());
        }
        Ok(Arc::new(file))
    }
}
