//! Work on the structures of an image while nobody uses it.

use super::disk::ImageDisk;
use super::problem::{told, unusable};
use crate::Result;
use fathom_core::DiskError;
use fathom_files::ImageFile;

impl ImageDisk {
    /// Has the image's own file be looked at, whether it is in use or not: but for what changes just then, it has what was
    /// last written to it.
    pub fn look<T>(
        &self,
        look: impl FnOnce(&dyn ImageFile) -> Result<T>,
    ) -> std::result::Result<T, DiskError> {
        let file = &self.chain.storages[0];
        look(file.bytes()).map_err(told(file.path()))
    }

    /// Has work done on the image's own file, as `offline` does it, under the locks that the disk takes when it is used. It
    /// is not in use, and whoever takes it into use then finds what was done.
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
