//! Changes the backing file of an image in a chain in use.

use super::active::Layer;
use super::disk::ImageDisk;
use super::open::{Link, opens_for_writing};
use super::problem::{told, unusable};
use super::storage::Storage;
use super::task::block_on;
use crate::Image;
use crate::offline::backing::{NewBacking, check_backing_in_use, set_backing_in_use};
use crate::resolve;
use fathom_core::DiskError;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

impl ImageDisk {
    /// Checks that the header of the image at that depth can name this backing file.
    pub fn check_backing(
        &self,
        depth: usize,
        backing: Option<NewBacking<'_>>,
    ) -> Result<(), DiskError> {
        let link = self.rebased_link(depth)?;
        let file = &self.chain.storages[usize::from(link.storage)];
        let checked = check_backing_in_use(file.bytes(), link.image.format(), backing);
        checked.map_err(told(file.path()))
    }

    /// Fails if the chain has fewer images than when it was opened, or a backing image was resized.
    ///
    /// Jobs rely on the chain as opened, and [side views](ImageDisk::side_view) are useless
    /// otherwise.
    fn check_as_opened(&self) -> Result<(), DiskError> {
        match self.chain.is_as_opened() {
            true => Ok(()),
            false => Err(unusable(
                self.chain.path(),
                "images of its chain were removed or resized; begin again",
            )),
        }
    }

    /// Fails if the chain has changed since it was opened, or images of these depths have
    /// snapshots.
    ///
    /// Internal snapshots need the backing images, too.
    pub fn check_images(&self, freed: Range<usize>) -> Result<(), DiskError> {
        self.check_as_opened()?;
        let active = self.active();
        let layers = active.as_ref().and_then(|active| active.layers.get(freed));
        let mut layers = layers.into_iter().flatten();
        match layers.any(|layer| layer.snapshots() > 0) {
            true => Err(unusable(
                self.chain.path(),
                "an image that would lose its backing images has got internal snapshots; begin \
                 again",
            )),
            false => Ok(()),
        }
    }

    /// Fails if `name` in the image at `above` means a file that has replaced an image of the
    /// chain.
    fn check_named(&self, above: &Path, name: &[u8]) -> Result<(), DiskError> {
        let Ok(named) = resolve(above, name) else {
            // (The code that writes the name rejects it.)
            return Ok(());
        };
        let is_named = |file: &&Arc<dyn Storage>| is_same_place(file.path(), &named);
        match self.chain.storages.iter().find(is_named) {
            Some(file) if !file.is_at(&named) => Err(unusable(
                file.path(),
                "replaced by another file since the disk opened it; restore the open file under \
                 this name",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the image at this depth, whose header may be written if it has one.
    fn rebased_link(&self, depth: usize) -> Result<Link, DiskError> {
        self.check_as_opened()?;
        let link = self.chain.links().get(depth).cloned();
        let link = link.filter(|_| opens_for_writing(&self.options, depth));
        link.ok_or_else(|| unusable(self.chain.path(), "its backing images must not change"))
    }

    /// Sets or removes the backing file of the image at that depth.
    ///
    /// The image is the first one, or one whose [header](SideViewKind::Between) can be written, and
    /// is in use. The image reads the same before and after, since all data that could differ is
    /// its own. The write of a single sector, which comes last, switches to the new backing file.
    /// The chain in use stays the old one until the next activation. Waits for a write-back of the
    /// image's metadata.
    pub fn set_backing(
        &self,
        depth: usize,
        backing: Option<NewBacking<'_>>,
    ) -> Result<(), DiskError> {
        let link = self.rebased_link(depth)?;
        let file = &self.chain.storages[usize::from(link.storage)];
        backing.map_or(Ok(()), |backing| {
            self.check_named(file.path(), backing.name)
        })?;
        let (path, file, format) = (file.path(), file.bytes(), link.image.format());
        let active = self.active();
        let layer = active.as_ref().map(|active| &active.layers[depth]);
        let Some(Layer::Tables(tables)) = layer else {
            return Err(unusable(path, "not in use, or without tables"));
        };
        // (A write-back also writes the header when the refcount table moves.)
        let _alone = block_on(tables.writing_back.lock_all());
        if tables.state().header.is_some() {
            return Err(unusable(path, "its header was not written earlier"));
        }
        let written = set_backing_in_use(file, format, backing);
        // The header is read again whether or not the write has failed.
        let now = Image::read(file, format);
        let mut rebased = self.rebased.lock();
        if let Ok(image) = &now {
            *rebased = Some((link.storage, image.clone()));
        }
        drop(rebased);
        tables.say_corrupt_again();
        written.and(now.map(drop)).map_err(told(path))
    }
}

/// Returns whether both paths are the same name in the same directory. The file of that name is not
/// examined.
fn is_same_place(one: &Path, other: &Path) -> bool {
    let directory = |path: &Path| {
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        fs::canonicalize(parent.unwrap_or(Path::new("."))).ok()
    };
    one == other
        || one.file_name() == other.file_name()
            && directory(one).is_some_and(|dir| directory(other) == Some(dir))
}
