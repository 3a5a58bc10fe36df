//! Resizes files while requests are served.

use super::open::{length_of, visible_size};
use super::{Kind, Shared};
use fathom_core::{DiskError, Resize};
use std::fs::File;
use std::sync::atomic::Ordering;

impl Shared {
    pub(super) fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let now = self.size.load(Ordering::Relaxed);
        let Some(size) = to.wanted(now)? else {
            return self.take_in();
        };
        if self.kind == Kind::BlockDevice {
            return match self.device_size()? == size {
                true => self.take_in(),
                false => Err(self.refused(
                    "the size of a device cannot be changed here; resize the device, and repeat \
                     without a size",
                )),
            };
        }
        match size >= now {
            true => self.grow(to, size)?,
            false => self.shrink(to, size)?,
        }
        Ok(size)
    }

    /// Adopts the file's current length, which something else has changed. Requests beyond the new
    /// size, in bytes, fail from now on.
    fn take_in(&self) -> Result<u64, DiskError> {
        let len = length_of(&self.path, &self.file)?;
        let size = self.visible_size(len)?;
        self.file_len.store(len, Ordering::Relaxed);
        self.size.store(size, Ordering::Relaxed);
        Ok(size)
    }

    fn device_size(&self) -> Result<u64, DiskError> {
        self.visible_size(length_of(&self.path, &self.file)?)
    }

    fn visible_size(&self, len: u64) -> Result<u64, DiskError> {
        visible_size(&self.path, len, self.options.read_only)
    }

    fn grow(&self, to: &Resize, size: u64) -> Result<(), DiskError> {
        let before = self.file_len.load(Ordering::Relaxed);
        let len = match self.padded.load(Ordering::Relaxed) {
            true => before,
            false => length_of(&self.path, &self.file)?,
        };
        // Another process may have made the file longer, perhaps with data: do not shrink it below
        // that.
        to.wanted(len & !511)?;
        let grown = self.set_len(size).and_then(|()| self.make_durable());
        grown.inspect_err(|_| {
            // The caller gets the first error, which says more than an error of this call would.
            let _ = self.file.set_len(len);
        })?;
        self.file_len.store(size, Ordering::Relaxed);
        self.size.store(size, Ordering::Relaxed);
        Ok(())
    }

    /// Shrinks the file. Waits first for writes in flight, which could make the file longer again.
    fn shrink(&self, to: &Resize, size: u64) -> Result<(), DiskError> {
        let before = self.size.swap(size, Ordering::Relaxed);
        let cut = (to.settle)().and_then(|()| self.set_len(size));
        cut.inspect_err(|_| self.size.store(before, Ordering::Relaxed))?;
        self.file_len.store(size, Ordering::Relaxed);
        self.make_durable()
    }

    fn set_len(&self, len: u64) -> Result<(), DiskError> {
        let set = self.file.set_len(len);
        set.map_err(|error| self.error("cannot resize the file", error))
    }

    /// Makes the file's length durable. Padding of the last block beyond the length is truncated
    /// when the disk is deactivated.
    fn make_durable(&self) -> Result<(), DiskError> {
        let synced = self.sync(File::sync_all);
        synced.map_err(|error| self.error("cannot make the new size durable", error))
    }

    fn refused(&self, problem: &str) -> DiskError {
        let path = self.path.display();
        DiskError::Refused(format!("{path}: {problem}"))
    }
}
