//! An image of a chain that is written to while those above it are in use, as a disk of its own: for whoever brings
//! into it what these have.

use super::active::Active;
use super::channel::ImageChannel;
use super::disk::{ImageOptions, Shared};
use super::open::{Chain, unusable};
use super::storage::Storage;
use crate::Format;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, Resize};
use std::path::PathBuf;
use std::sync::Arc;

/// An image of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainImage {
    /// The file that it is in.
    pub path: PathBuf,
    pub format: Format,
    /// Of the disk that it is with those below it, in bytes.
    pub size: u64,
}

/// It shares all that is in memory of its image with the disk that it is a part of, whose users see at once what is
/// written to it where nothing above has anything. It is in use as long as that one is.
pub struct LayerDisk {
    shared: Arc<Shared>,
    storages: Vec<Arc<dyn Storage>>,
    path: PathBuf,
    depth: usize,
    info: DiskInfo,
}

impl LayerDisk {
    pub(super) fn new(
        chain: &Chain,
        options: &ImageOptions,
        depth: usize,
    ) -> Result<LayerDisk, DiskError> {
        let Some(link) = chain.links.get(depth) else {
            let problem = format!("has no image below it at depth {depth}");
            return Err(unusable(chain.path(), problem));
        };
        Ok(LayerDisk {
            shared: Arc::new(Shared::new(chain.size(depth), false, options)),
            storages: chain.storages.clone(),
            path: chain.storages[usize::from(link.storage)].path().to_owned(),
            depth,
            info: chain.info(options, depth),
        })
    }

    /// Images of the chain that are above it.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The chain is in use.
    pub(super) fn begin(&self, chain: &Active) {
        self.shared
            .set_active(Some(Arc::new(chain.from(self.depth))));
    }

    pub(super) fn end(&self) {
        self.shared.set_active(None);
    }
}

impl Disk for LayerDisk {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn activate(&self) -> Result<(), DiskError> {
        match self.shared.active() {
            Some(_) => Ok(()),
            None => Err(unusable(&self.path, "the image above it is not in use")),
        }
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn resize(&self, _: &Resize) -> Result<u64, DiskError> {
        let problem = "cannot be resized below others";
        Err(unusable(&self.path, problem))
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        ImageChannel::boxed(&self.shared, &self.storages, &self.path, cx)
    }
}
