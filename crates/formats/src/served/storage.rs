//! The interface of the files that images are stored in.

use fathom_core::{Disk, DiskError};
use fathom_files::{FileId, ImageFile};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Decides whether bytes beyond the end of a file read as zeroes. If false, the read fails.
pub type EndGuard = Arc<dyn Fn(Range<u64>) -> bool + Send + Sync>;

/// A file that holds an image, or a part of one.
///
/// A storage has blocking access, for opening and closing the image, and a [`Disk`] for requests.
/// Once a write through one of them has returned, the other one sees its data.
pub trait Storage: Send + Sync {
    /// Returns the blocking access.
    fn bytes(&self) -> &dyn ImageFile;
    /// Returns the disk for requests.
    ///
    /// Bytes beyond the file's end read as zeroes. A write there makes the file longer, unless it
    /// is a block device.
    fn disk(&self) -> &dyn Disk;
    /// Returns the path of the file, as the user knows it.
    fn path(&self) -> &Path;
    /// Returns the device and inode, which two storages share exactly if they are the same file.
    fn identity(&self) -> (u64, u64);
    /// Returns the identity of the file, which is valid while the file is open.
    fn file_id(&self) -> FileId {
        let (device, inode) = self.identity();
        FileId::File { device, inode }
    }

    /// Returns the identities of all files of the storage: a VMDK image may have several.
    fn identities(&self) -> Vec<(u64, u64)> {
        vec![self.identity()]
    }
    /// Returns whether that path now leads to this file.
    fn is_at(&self, path: &Path) -> bool {
        self.path() == path
    }
    /// Sets the guard that decides about each later read beyond the file's end.
    ///
    /// (A storage that no other process can truncate need not call it.)
    fn guard_end(&self, _guard: EndGuard) {}
}

/// Opens the files that images name: backing files and external data files.
///
/// The opener decides which files these may be, since the author of the image is not trusted.
pub trait Opener: Send + Sync {
    /// Opens the file that `image` calls `name` for reading, and for writing if `writable`.
    ///
    /// The error is one line that names both.
    fn open(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<Arc<dyn Storage>, DiskError>;

    /// Opens the external data file of `image`, like [`Opener::open`].
    ///
    /// Writing to it requires more permission than being named by the image.
    fn open_data_file(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<Arc<dyn Storage>, DiskError>;
}
