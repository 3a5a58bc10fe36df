//! Side views: further disks on the images of a disk's chain, for jobs that change the chain.

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
    /// Path of the image's file.
    pub path: PathBuf,
    /// Format of the image.
    pub format: Format,
    /// Size in bytes of the disk that this image and its backing images form.
    pub size: u64,
    /// Number of internal snapshots; they need the backing images, too.
    pub snapshots: u32,
}

impl ChainImage {
    /// Returns whether both are the same image; their snapshots may differ.
    pub fn is_same(&self, other: &ChainImage) -> bool {
        (&self.path, self.format, self.size) == (&other.path, other.format, other.size)
    }
}

/// The purpose of a side view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SideViewKind {
    /// The image at that depth, 1 or more, with all images below it. Data written to it is visible
    /// where the images above have none.
    Below(usize),
    /// Two side views. The first is the image at depth `base`, as for `Below`. The second is only
    /// read: the image at depth `top`, from 1 to less than `base`, with all images below it. The
    /// header of the image above `top` can be written.
    Between {
        /// Depth of the image that the second view reads.
        top: usize,
        /// Depth of the image that the first view writes to.
        base: usize,
    },
    /// The same disk with copy-on-read: data that is read is copied into the top image.
    CopyOnRead,
}

impl SideViewKind {
    /// Returns the depth of the backing image that is written to.
    pub(super) fn base(self) -> Option<usize> {
        match self {
            SideViewKind::Below(base) | SideViewKind::Between { base, .. } => Some(base),
            SideViewKind::CopyOnRead => None,
        }
    }

    /// Returns the depth of the image of which only the header is written.
    pub(super) fn header(self) -> Option<usize> {
        match self {
            SideViewKind::Between { top, .. } => top.checked_sub(1),
            SideViewKind::Below(_) | SideViewKind::CopyOnRead => None,
        }
    }
}

/// A side view of a disk. The view shares all state in memory with the disk, and is in use while
/// the disk is in use.
pub struct SideView {
    shared: Arc<Shared>,
    storages: Vec<Arc<dyn Storage>>,
    path: PathBuf,
    depth: usize,
    info: DiskInfo,
}

impl SideView {
    /// Creates the side views that the options ask for, the writable one first.
    pub(super) fn all(
        chain: &Chain,
        options: &ImageOptions,
    ) -> Result<Vec<Arc<SideView>>, DiskError> {
        let depths = match options.side_view {
            None => vec![],
            Some(SideViewKind::CopyOnRead) => vec![0],
            Some(SideViewKind::Below(base)) => vec![base],
            Some(SideViewKind::Between { top, base }) => vec![base, top],
        };
        let disks = depths.into_iter();
        let disks = disks.map(|depth| SideView::new(chain, options, depth).map(Arc::new));
        disks.collect()
    }

    fn new(chain: &Chain, options: &ImageOptions, depth: usize) -> Result<SideView, DiskError> {
        let Some(link) = chain.links().get(depth).cloned() else {
            let problem = format!("no backing image at depth {depth}");
            return Err(unusable(chain.path(), problem));
        };
        let info = chain.info(options, depth);
        let mut shared = Shared::new(chain.size(depth), info.read_only, options);
        shared.compress = false;
        shared.copies_on_read = options.side_view == Some(SideViewKind::CopyOnRead);
        Ok(SideView {
            shared: Arc::new(shared),
            storages: chain.storages.clone(),
            path: chain.storages[usize::from(link.storage)].path().to_owned(),
            depth,
            info,
        })
    }

    /// Returns the number of images of the chain above this one.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Starts the use of the side view; called when the chain is activated.
    pub(super) fn begin(&self, chain: &Active) {
        self.shared
            .set_active(Some(Arc::new(chain.from(self.depth))));
    }

    pub(super) fn end(&self) {
        self.shared.set_active(None);
    }
}

impl Disk for SideView {
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
