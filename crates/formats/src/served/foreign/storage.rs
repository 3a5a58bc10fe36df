//! An image in another program's format as a storage.

use super::bytes::ForeignBytes;
use super::channel::ForeignChannel;
use super::tables::Tables;
use crate::served::helpers::Helpers;
use crate::served::problem::unusable;
use crate::served::storage::{EndGuard, Storage};
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo};
use fathom_files::{FileId, ImageFile};
use fathom_units::cause;
use std::path::Path;
use std::sync::Arc;

pub(super) struct Foreign {
    bytes: ForeignBytes,
    disk: ForeignDisk,
}

impl Foreign {
    pub(super) fn new(tables: Tables, helpers: &Helpers) -> Foreign {
        let bytes = ForeignBytes(Arc::new(tables));
        Foreign {
            disk: ForeignDisk {
                bytes: bytes.clone(),
                helpers: Arc::new(helpers.for_files()),
            },
            bytes,
        }
    }
}

impl Storage for Foreign {
    fn bytes(&self) -> &dyn ImageFile {
        &self.bytes
    }

    fn disk(&self) -> &dyn Disk {
        &self.disk
    }

    fn path(&self) -> &Path {
        self.bytes.0.path()
    }

    fn identity(&self) -> (u64, u64) {
        self.bytes.0.files[0].identity()
    }

    fn file_id(&self) -> FileId {
        self.bytes.0.files[0].file_id()
    }

    fn identities(&self) -> Vec<(u64, u64)> {
        let files = self.bytes.0.files.iter();
        files.map(|file| file.identity()).collect()
    }

    fn is_at(&self, path: &Path) -> bool {
        self.bytes.0.files[0].is_at(path)
    }

    /// Does nothing: data cut off the files is an error in any case.
    fn guard_end(&self, _guard: EndGuard) {}
}

struct ForeignDisk {
    bytes: ForeignBytes,
    helpers: Arc<Helpers>,
}

impl ForeignDisk {
    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.bytes.0.files
    }

    fn unlock(&self, files: &[Arc<dyn Storage>]) -> Result<(), DiskError> {
        let unlocked = files.iter().map(|file| file.disk().deactivate());
        unlocked.fold(Ok(()), Result::and)
    }
}

impl Disk for ForeignDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size: self.bytes.0.image().size(),
            // The image is read through the page cache.
            block_size: 512,
            read_only: true,
            discard: None,
            write_zeroes: None,
            ..self.files()[0].disk().info()
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        let files = self.files();
        for (n, file) in files.iter().enumerate() {
            if let Err(error) = file.disk().activate() {
                let _ = self.unlock(&files[..n]);
                return Err(error);
            }
        }
        // (Another host may have written to the files.)
        self.bytes.forget_cache();
        self.bytes.0.read_again().inspect_err(|_| {
            let _ = self.unlock(files);
        })
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.unlock(self.files())
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let channel = ForeignChannel::new(&self.bytes, &self.helpers, cx);
        let channel = channel.map_err(|error| {
            let problem = format!("cannot start a worker's channel: {}", cause(error));
            unusable(self.bytes.0.path(), problem)
        });
        Ok(Box::new(channel?))
    }
}
