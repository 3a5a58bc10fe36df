//! The files that qcow2 and QED images are in, as the formats use them.

use crate::confined::{AllowedDirs, data_file, no_data_file};
use fathom_core::{Disk, DiskError};
use fathom_formats::ImageFile;
use fathom_formats::served::{EndGuard, ImageDisk, ImageOptions, Opener, Storage};
use fathom_storage::{FileDisk, FileOptions};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An open file of an image.
pub struct StoredImage {
    path: PathBuf,
    disk: Arc<FileDisk>,
    /// The same file through the page cache, whatever way the disk takes: the
    /// kernel keeps both views the same.
    file: File,
    identity: (u64, u64),
    grows: bool,
}

impl StoredImage {
    /// The image that the user names.
    pub fn open(path: &Path, options: FileOptions) -> Result<StoredImage, DiskError> {
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
        Ok(StoredImage {
            path: path.to_owned(),
            disk: Arc::new(disk),
            file,
            identity: (metadata.dev(), metadata.ino()),
            grows: metadata.is_file(),
        })
    }

    /// Whether it is a regular file, not a device.
    pub fn is_file(&self) -> bool {
        self.grows
    }

    /// What requests go to.
    pub fn file_disk(&self) -> &Arc<FileDisk> {
        &self.disk
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
        self.disk.guard_end(guard);
    }
}

impl ImageFile for StoredImage {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        ImageFile::read_at(&self.file, buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        ImageFile::write_at(&self.file, buf, offset)
    }

    fn len(&self) -> io::Result<u64> {
        ImageFile::len(&self.file)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        ImageFile::set_len(&self.file, len)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        ImageFile::allocate(&self.file, offset, len)
    }

    fn forget_cache(&self) {
        self.file.forget_cache();
    }

    fn is_hole(&self, offset: u64, len: u64) -> bool {
        ImageFile::is_hole(&self.file, offset, len)
    }

    fn run_at(&self, offset: u64) -> (bool, u64) {
        self.file.run_at(offset)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.file.allocated()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        ImageFile::discard(&self.file, offset, len)
    }
}

/// Opens the files that images name, in the directories that they may use, and
/// the data file that the user names.
pub struct ImageOpener {
    dirs: AllowedDirs,
    data_file: Option<DataFile>,
    options: FileOptions,
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
            dirs,
            data_file: None,
            options,
        }
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
        let (path, file) = self.dirs.open(image, name)?;
        let stored = StoredImage::from_file(&path, file, self.read_only())?;
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
        Ok(Arc::new(StoredImage::open(path, options)?))
    }
}
