//! What an image needs of the files that it is in.

use fathom_core::{Disk, DiskError};
use fathom_files::{FileId, ImageFile};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Asked about bytes that a read wants and that lie behind the file's end: whether they read as zeroes. False: the read
/// fails.
pub type EndGuard = Arc<dyn Fn(Range<u64>) -> bool + Send + Sync>;

/// A file that holds an image, or a part of one: blocking access for opening
/// and closing it, and a [`Disk`] for requests. Both see the same bytes once
/// what was written through one has returned.
pub trait Storage: Send + Sync {
    /// For whoever waits.
    fn bytes(&self) -> &dyn ImageFile;
    /// For requests. What lies beyond the file's end reads as zeroes; a write
    /// there makes the file longer, unless it is a block device.
    fn disk(&self) -> &dyn Disk;
    /// Its name, for people.
    fn path(&self) -> &Path;
    /// The same for two storages exactly if they are the same file.
    fn identity(&self) -> (u64, u64);
    /// Identity of the file for as long as it is open.
    fn file_id(&self) -> FileId {
        let (device, inode) = self.identity();
        FileId::File { device, inode }
    }

    /// The identities of all files that it is in: a VMDK image may be in several.
    fn identities(&self) -> Vec<(u64, u64)> {
        vec![self.identity()]
    }
    /// Whether that path leads to it now.
    fn is_at(&self, path: &Path) -> bool {
        self.path() == path
    }
    /// From now on requests that read beyond the file's end ask first.
    /// (Storages that nobody else can cut need not.)
    fn guard_end(&self, _guard: EndGuard) {}
}

/// Opens the files that images name: backing files and external data files.
/// It decides which files those may be, since a stranger may have made the
/// image.
pub trait Opener: Send + Sync {
    /// Opens what `image` calls `name`, to read it, and if it is to be `writable`,
    /// to write to it. The error is one line that names both.
    fn open(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<Arc<dyn Storage>, DiskError>;

    /// Likewise, the external data file of `image`. To write to it takes more
    /// than that the image names it.
    fn open_data_file(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<Arc<dyn Storage>, DiskError>;
}
