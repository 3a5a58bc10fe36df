//! Exclusive access to the structures of an image that is not in use.

use super::disk::ImageDisk;
use super::problem::{told, unusable};
use crate::Result;
use fathom_core::DiskError;
use fathom_files::ImageFile;

impl ImageDisk {
    /// Calls `look` with the top image's file, whether the disk is in use or not.
    ///
    /// `look` sees the state last written to the file, except for changes in progress.
    pub fn look<T>(
        &self,
        look: impl FnOnce(&dyn ImageFile) -> Result<T>,
    ) -> std::result::Result<T, DiskError> {
        let file = &self.chain.storages[0];
        look(file.bytes()).map_err(told(file.path()))
    }

    /// Calls `work` with the top image's file, under the same locks as when the disk is in use.
    ///
    /// `work` changes the file as `offline` does, and the next activation sees its changes. Fails
    /// if the disk is in use or read-only.
    pub fn alone<T>(
        &self,
        work: impl FnOnce(&dyn ImageFile) -> Result<T>,
    ) -> std::result::Result<T, DiskError> {
        let file = &self.chain.storages[0];
        let path = file.path();
        if self.active().is_some() || self.options.read_only {
            return Err(unusable(path, "in use, or read-only"));
        }
        file.disk().activate()?;
        if !self.options.keep_page_cache {
            file.bytes().forget_cache();
        }
        let done = work(file.bytes()).map_err(told(path));
        let unlocked = file.disk().deactivate();
        done.and_then(|done| unlocked.map(|()| done))
    }
}
