//! Internal snapshots of a disk's image.

use super::Served;
use super::mirror::has_filter;
use fathom_formats::Format;
use fathom_formats::served::ImageDisk;
use std::sync::Arc;

impl Served {
    /// Returns the disk's image, if the image can have internal snapshots.
    pub fn qcow2_image(&self) -> Option<Arc<ImageDisk>> {
        let image = self.stack.image.clone();
        image.filter(|_| self.stack.format == Format::Qcow2 && !self.is_temporary())
    }

    /// Returns why the internal snapshots cannot be changed.
    pub fn may_not_have_snapshots(&self) -> Option<String> {
        if self.options.disk.read_only {
            Some("the disk is read-only".into())
        } else if self.is_changed_by_others() {
            Some("other processes may change the image without notice".into())
        } else if let Some(problem) = self.shared.may_not_be_changed() {
            Some(problem.into())
        } else {
            self.may_not_be_disturbed()
        }
    }

    /// Whether the disk's changes are discarded when the server ends: they are then in an overlay,
    /// not in the user's image.
    fn is_temporary(&self) -> bool {
        has_filter(self.spec(), "cow")
    }
}
