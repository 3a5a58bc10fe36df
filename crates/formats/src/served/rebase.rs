//! Another backing file for an image in use.

use super::disk::ImageDisk;
use super::problem::{told, unusable};
use super::task::block_on;
use crate::offline::Image;
use crate::offline::backing::{NewBacking, check_backing_in_use, set_backing_in_use};
use fathom_core::DiskError;
use std::sync::PoisonError;

impl ImageDisk {
    /// Whether the image's header can name that, as it is now. The error is for the user.
    pub fn check_backing(&self, backing: Option<NewBacking<'_>>) -> Result<(), DiskError> {
        let file = self.chain.storages[0].bytes();
        check_backing_in_use(file, self.options.format, backing).map_err(told(self.chain.path()))
    }

    /// Gives the image, which is in use for writing, another backing file, or none, which makes no difference for what the
    /// disk reads as: what could is its own. One sector that is written last switches to it. The chain that is in use stays
    /// the old one until the image is opened again. Waits for what is written back of its metadata.
    pub fn set_backing(&self, backing: Option<NewBacking<'_>>) -> Result<(), DiskError> {
        let path = self.chain.path();
        let active = self.active();
        let tables = active.as_ref().and_then(|active| active.top());
        let Some(tables) = tables.filter(|tables| tables.writable) else {
            return Err(unusable(path, "is not in use for writing"));
        };
        // (Which writes the header when the refcount table moves.)
        let _alone = block_on(tables.writing_back.lock_all());
        if tables.state().header.is_some() {
            return Err(unusable(path, "its header could not be written before"));
        }
        let (file, format) = (self.chain.storages[0].bytes(), self.options.format);
        let written = set_backing_in_use(file, format, backing);
        // Whatever has come of it.
        let now = Image::read(file, format);
        let mut rebased = self.rebased.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(image) = &now {
            *rebased = Some(image.clone());
        }
        drop(rebased);
        tables.say_corrupt_again();
        written.and(now.map(drop)).map_err(told(path))
    }
}
