//! A disk whose image may have internal snapshots.

use super::Served;
use super::mirror::has_filter;
use fathom_formats::Format;
use fathom_formats::served::ImageDisk;
use std::sync::Arc;

impl Served {
    /// The image that can have some.
    pub fn qcow2_image(&self) -> Option<Arc<ImageDisk>> {
        let image = self.stack.image.clone();
        image.filter(|_| self.stack.format == Format::Qcow2 && !self.is_temporary())
    }

    /// Why they cannot be changed.
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

    /// What is changed goes with the server: its image is another one than the user's.
    fn is_temporary(&self) -> bool {
        has_filter(self.spec(), "cow")
    }
}
