//! Other disks on the images of a chain, beside the one that users have: for jobs that change the chain.

use super::active::Active;
use super::channel::ImageChannel;
use super::disk::Shared;
use super::open::Chain;
use super::options::ImageOptions;
use super::problem::unusable;
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
    /// So many internal snapshots it has, which need what is below it, too.
    pub snapshots: u32,
}

impl ChainImage {
    /// It may have other snapshots.
    pub fn is_same(&self, other: &ChainImage) -> bool {
        (&self.path, self.format, self.size) == (&other.path, other.format, other.size)
    }
}

/// What a disk is for that is beside another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// It is the image of that depth, 1 or more, with all that is below it: what it is written to is seen where those above
    /// have nothing.
    Below(usize),
    /// There are two. One is the image of depth `base`, as above; the other one, which is only read, is that of depth
    /// `top`, 1 or more and less than `base`, with all that is below it. The header of the image above that can be written.
    Between { top: usize, base: usize },
    /// It is the same disk; what is read by it becomes the image's own.
    CopyOnRead,
}

impl Beside {
    /// The image below others that is written to.
    pub(super) fn base(self) -> Option<usize> {
        match self {
            Beside::Below(base) | Beside::Between { base, .. } => Some(base),
            Beside::CopyOnRead => None,
        }
    }

    /// The image whose header alone is written to.
    pub(super) fn header(self) -> Option<usize> {
        match self {
            Beside::Between { top, .. } => top.checked_sub(1),
            Beside::Below(_) | Beside::CopyOnRead => None,
        }
    }
}

/// It shares all that is in memory of the images with the disk that users have, and is in use as long as that one is.
pub struct BesideDisk {
    shared: Arc<Shared>,
    storages: Vec<Arc<dyn Storage>>,
    path: PathBuf,
    depth: usize,
    info: DiskInfo,
}

impl BesideDisk {
    /// The one that is written to first.
    pub(super) fn all(
        chain: &Chain,
        options: &ImageOptions,
    ) -> Result<Vec<Arc<BesideDisk>>, DiskError> {
        let depths = match options.beside {
            None => vec![],
            Some(Beside::CopyOnRead) => vec![0],
            Some(Beside::Below(base)) => vec![base],
            Some(Beside::Between { top, base }) => vec![base, top],
        };
        let disks = depths.into_iter();
        let disks = disks.map(|depth| BesideDisk::new(chain, options, depth).map(Arc::new));
        disks.collect()
    }

    fn new(chain: &Chain, options: &ImageOptions, depth: usize) -> Result<BesideDisk, DiskError> {
        let Some(link) = chain.links().get(depth).cloned() else {
            let problem = format!("no backing image at depth {depth}");
            return Err(unusable(chain.path(), problem));
        };
        let info = chain.info(options, depth);
        let mut shared = Shared::new(chain.size(depth), info.read_only, options);
        shared.compress = false;
        shared.copies_on_read = options.beside == Some(Beside::CopyOnRead);
        Ok(BesideDisk {
            shared: Arc::new(shared),
            storages: chain.storages.clone(),
            path: chain.storages[usize::from(link.storage)].path().to_owned(),
            depth,
            info,
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

impl Disk for BesideDisk {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn activate(&self) -> Result<(), DiskError> {
        match self.shared.active() {
            Some(_) => Ok(()),
            None => Err(unusable(&self.path, "not in use")),
        }
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn resize(&self, _: &Resize) -> Result<u64, DiskError> {
        let problem = "a job cannot resize this image";
        Err(unusable(&self.path, problem))
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        ImageChannel::boxed(&self.shared, &self.storages, &self.path, cx)
    }
}
