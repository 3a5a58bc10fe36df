//! Marks an image as open while it may be written to.
//!
//! A qcow2 image with refcounts has no such flag. After a kill it is sound, but clusters may be
//! leaked. (With lazy refcounts, and in QED images, the header has a flag, and the image is
//! repaired at activation.)

use super::layout::Layout;
use super::tables::Tables;
use fathom_units::cause;
use std::sync::atomic::Ordering;

impl Tables {
    /// Checks whether the last writer has closed the image, and marks the image as open.
    pub(super) fn open_for_writing(&self) {
        if !self.has_open_mark() {
            return;
        }
        let file = self.file.bytes();
        if file.is_marked_open() {
            let is_known = self.may_leak.load(Ordering::Relaxed);
            self.note_leaks();
            if self.storage == 0 && !is_known {
                let path = self.file.path().display();
                tracing::info!(
                    "{path}: not closed after a write, so clusters may be leaked (run 'fathom \
                     img check --repair leaks' when the disk is not in use)"
                );
            }
        } else if let Err(error) = file.mark_open(true) {
            let path = self.file.path().display();
            tracing::debug!("{path}: cannot mark the image as open: {}", cause(error));
        }
    }

    /// Removes the mark after everything was written back.
    ///
    /// The mark of an image that may have leaked clusters stays, for the next writer.
    pub(super) fn close_for_writing(&self) {
        if !self.has_open_mark() || self.may_leak.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.file.bytes().mark_open(false) {
            let path = self.file.path().display();
            tracing::debug!("{path}: cannot remove its open mark: {}", cause(error));
        }
    }

    /// Notes that clusters may be allocated that nothing uses.
    pub(super) fn note_leaks(&self) {
        self.may_leak.store(true, Ordering::Relaxed);
        self.condition.note_leaks(self.storage);
    }

    fn has_open_mark(&self) -> bool {
        self.writable && matches!(self.layout, Layout::Qcow2(_))
    }
}
