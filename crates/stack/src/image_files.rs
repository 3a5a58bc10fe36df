//! The files that qcow2 and QED images are in, as the formats use them.

use crate::confined::{AllowedDirs, data_file, no_data_file};
use fathom_core::{Disk, DiskError};
use fathom_formats::ImageFile;
use fathom_formats::served::{EndGuard, ImageDisk, ImageOptions, Opener, Storage};
use fathom_storage::{Blocking, FileDisk, FileOptions, Location, OpenOptions, Opened};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What an image is in, open: a file, mostly.
pub struct StoredImage {
    path: PathBuf,
    disk: Arc<dyn Disk>,
    bytes: Bytes,
    identity: (u64, u64),
    grows: bool,
}

/// The same bytes as the disk's, for who waits.
enum Bytes {
    /// Through the page cache, whatever way the disk takes: the kernel keeps both views the same.
    File(Arc<FileDisk>, File),
    Other(Arc<dyn Blocking>),
}

impl StoredImage {
    /// The image that the user names.
    pub fn open(location: &Location, options: &OpenOptions) -> Result<StoredImage, DiskError> {
        if let Some(path) = location.path() {
            return StoredImage::in_file(path, options.into());
        }
        let options = OpenOptions {
            growable: true,
            ..options.clone()
        };
        let Opened { disk, blocking, .. } = location.open(&options)?;
        let path = PathBuf::from(location.to_string());
        let Some(blocking) = blocking else {
            let problem = "images of formats are not served from there".into();
            return Err(DiskError::Unusable { path, problem });
        };
        let mut name = DefaultHasher::new();
        path.hash(&mut name);
        Ok(StoredImage {
            disk,
            grows: blocking.grows(),
            bytes: Bytes::Other(blocking),
            // No device has this number.
            identity: (u64::MAX, name.finish()),
            path,
        })
    }

    /// The image in a file that the user names.
    pub fn in_file(path: &Path, options: FileOptions) -> Result<StoredImage, DiskError> {
        let options = FileOptions {
            growable: true,
            ..options
        };
        StoredImage::new(path, FileDisk::open(path, options)?)
    }

    /// An image in a file that is open; `path` is its name.
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
        let metadata = file.metadata().map_err(|source| DiskError::Io {
            path: path.to_owned(),
            what: "cannot be examined",
            source,
        })?;
        let disk = Arc::new(disk);
        Ok(StoredImage {
            path: path.to_owned(),
            disk: disk.clone(),
            bytes: Bytes::File(disk, file),
            identity: (metadata.dev(), metadata.ino()),
            grows: metadata.is_file(),
        })
    }

    /// Whether it is a regular file, not a device.
    pub fn is_file(&self) -> bool {
        self.grows
    }

    /// What requests go to, if that is a file.
    pub fn file_disk(&self) -> Option<&Arc<FileDisk>> {
        match &self.bytes {
            Bytes::File(disk, _) => Some(disk),
            Bytes::Other(_) => None,
        }
    }
}

impl Storage for StoredImage {
    fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn grows(&self) -> bool {
        self.grows
    }

    fn identity(&self) -> (u64, u64) {
        self.identity
    }

    fn guard_end(&self, guard: EndGuard) {
        if let Some(disk) = self.file_disk() {
            disk.guard_end(guard);
        }
    }
}

impl ImageFile for StoredImage {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::File(_, file) => ImageFile::read_at(file, buf, offset),
            Bytes::Other(bytes) => bytes.read_at(buf, offset),
        }
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::File(_, file) => ImageFile::write_at(file, buf, offset),
            Bytes::Other(bytes) => bytes.write_at(buf, offset),
        }
    }

    fn len(&self) -> io::Result<u64> {
        match &self.bytes {
            Bytes::File(_, file) => ImageFile::len(file),
            Bytes::Other(bytes) => bytes.len(),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::File(_, file) => ImageFile::set_len(file, len),
            Bytes::Other(bytes) => bytes.set_len(len),
        }
    }

    fn sync(&self) -> io::Result<()> {
        match &self.bytes {
            Bytes::File(_, file) => file.sync(),
            Bytes::Other(bytes) => bytes.sync(),
        }
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::File(_, file) => ImageFile::allocate(file, offset, len),
            Bytes::Other(bytes) if bytes.len()? < offset + len => bytes.set_len(offset + len),
            Bytes::Other(_) => Ok(()),
        }
    }

    fn forget_cache(&self) {
        match &self.bytes {
            Bytes::File(_, file) => file.forget_cache(),
            Bytes::Other(bytes) => bytes.forget_cache(),
        }
    }

    fn is_hole(&self, offset: u64, len: u64) -> bool {
        match &self.bytes {
            Bytes::File(_, file) => ImageFile::is_hole(file, offset, len),
            Bytes::Other(bytes) => {
                matches!(bytes.run_at(offset), (true, end) if end >= offset + len)
            }
        }
    }

    fn run_at(&self, offset: u64) -> (bool, u64) {
        match &self.bytes {
            Bytes::File(_, file) => file.run_at(offset),
            Bytes::Other(bytes) => bytes.run_at(offset),
        }
    }

    fn allocated(&self) -> io::Result<u64> {
        match &self.bytes {
            Bytes::File(_, file) => file.allocated(),
            Bytes::Other(bytes) => bytes.allocated(),
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::File(_, file) => ImageFile::discard(file, offset, len),
            Bytes::Other(bytes) => bytes.discard(offset, len),
        }
    }
}

/// Opens what images name, where that may be, and the data file that the user names.
pub struct ImageOpener {
    reach: Reach,
    data_file: Option<DataFile>,
    options: FileOptions,
}

/// Where what an image names may be.
enum Reach {
    /// Files in the directories that it may use.
    Files(AllowedDirs),
    /// What its kind of storage has beside it, opened likewise.
    Beside(Location, OpenOptions),
}

/// The external data file of one image, as the user names both.
struct DataFile {
    image: PathBuf,
    path: PathBuf,
}

impl ImageOpener {
    /// `options` are those of the image itself.
    pub fn new(dirs: AllowedDirs, options: FileOptions) -> ImageOpener {
        ImageOpener {
            reach: Reach::Files(dirs),
            data_file: None,
            options,
        }
    }

    /// For an image that the user names, in a file or not; `more`: where the files that it names may be, beside
    /// its own directory.
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
            options: file_options,
        })
    }

    /// Takes what the user has given as the data file of `image`, if anything,
    /// whatever the image calls it.
    pub fn with_data_file(self, image: &Path, given: Option<&Path>) -> ImageOpener {
        let data_file = given.map(|path| DataFile {
            image: image.to_owned(),
            path: path.to_owned(),
        });
        ImageOpener { data_file, ..self }
    }

    /// Opens an image and what it names.
    pub fn open_disk(
        self,
        image: Arc<StoredImage>,
        options: ImageOptions,
    ) -> Result<ImageDisk, DiskError> {
        let opener = Arc::new(self);
        let disk = ImageDisk::open(image, opener.clone(), options)?;
        match &opener.data_file {
            Some(given) if !disk.has_file(&given.path) => Err(no_data_file(&given.image)),
            _ => Ok(disk),
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
    fn open(&self, image: &Path, name: &[u8]) -> Result<Arc<dyn Storage>, DiskError> {
        let stored = match &self.reach {
            Reach::Files(dirs) => {
                let (path, file) = dirs.open(image, name)?;
                StoredImage::from_file(&path, file, self.read_only())?
            }
            Reach::Beside(location, options) => {
                let shown = String::from_utf8_lossy(name);
                let named = location.beside(&shown).ok_or_else(|| DiskError::Unusable {
                    path: image.to_owned(),
                    problem: format!(
                        "it names {}, and may only name what is beside it: {}",
                        shown.escape_debug(),
                        location.kind().form
                    ),
                })?;
                let options = OpenOptions {
                    read_only: true,
                    ..options.clone()
                };
                StoredImage::open(&named, &options)?
            }
        };
        Ok(Arc::new(stored))
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
            (None, false) => return self.open(image, name),
            (Some(_), false) => self.read_only(),
            (_, true) => FileOptions {
                force_share: false,
                ..self.options.clone()
            },
        };
        let path = data_file(image, name, given)?;
        Ok(Arc::new(StoredImage::in_file(path, options)?))
    }
}
