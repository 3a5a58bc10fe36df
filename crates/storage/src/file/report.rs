//! Logs errors of files.

use fathom_core::Op;
use fathom_units::cause;
use parking_lot::Mutex;
use std::io;
use std::path::Path;

/// Logs a failed request. The log itself suppresses repeated messages.
#[cold]
pub(crate) fn report(path: &Path, op: Op, offset: u64, len: u64, errno: i32) {
    let error = io::Error::from_raw_os_error(errno);
    tracing::error!(
        "{}: {} of {len} bytes at offset {offset} failed: {}",
        path.display(),
        op.name(),
        cause(error)
    );
}

/// End of a file as it was last logged, so that it is logged once.
#[derive(Default)]
pub(super) struct ToldEnd(Mutex<Option<u64>>);

impl ToldEnd {
    /// Logs that a read failed because the file ends at `end`, before the disk's `size` (both in
    /// bytes). Logs each end once.
    pub(super) fn report(&self, path: &Path, end: u64, size: u64) {
        let mut told = self.0.lock();
        if told.replace(end) != Some(end) {
            tracing::error!(
                "{}: truncated while it was served: the file ends at {end} bytes, the disk at \
                 {size}; reads beyond the file's end fail until the file has its size again, or \
                 the disk is resized (fathom disk resize)",
                path.display(),
            );
        }
    }
}
