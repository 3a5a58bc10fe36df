//! An image as a disk.

use super::address::Address;
use super::channel::RbdChannel;
use super::cluster::Settings;
use super::image::Image;
use super::inquirer::Inquirer;
use super::shared::{Shared, SizeWatcher};
use crate::file::Cache;
use crate::kind::OpenOptions;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, RangeLimits, Resize, SizeWatch};
use fathom_files::ImageFile;
use std::sync::Arc;

/// The longest discard and write zeroes: each object in it is an operation.
const MAX_RANGE: u64 = 1 << 30;
/// Below that, OSDs do not give space back (rbd_discard_granularity_bytes).
const DISCARD_ALIGNMENT: u32 = 64 << 10;
/// What OSDs write in one piece (bluestore_min_alloc_size).
const PHYSICAL: u32 = 4096;

/// An image of a cluster.
pub struct RbdDisk {
    shared: Arc<Shared>,
    discard: bool,
    /// Bytes that an object gets in one piece.
    stripe: u64,
    locks: bool,
    watcher: Arc<SizeWatcher>,
}

impl RbdDisk {
    pub(super) fn open(address: &Address, options: &OpenOptions) -> Result<RbdDisk, DiskError> {
        let read_only = options.read_only;
        if address.snapshot.is_some() && !read_only {
            return Err(DiskError::Unusable {
                path: address.to_string().into(),
                problem: "snapshots can be read only: pass --readonly".into(),
            });
        }
        let settings = Settings {
            grows: options.growable && !read_only,
            caches: options.cache == Cache::Writeback,
            timeout: options.server_timeout.and_then(|timeout| timeout.0),
        };
        let mut image = Image::open(address, read_only, &settings)?;
        let watcher = Arc::new(SizeWatcher::default());
        if address.snapshot.is_none() {
            let watcher = watcher.clone();
            image.watch(Arc::new(move || watcher.tell()))?;
        }
        let size = image.size()? & !511;
        if size == 0 {
            return Err(image.unusable("it is empty; a disk needs 512 bytes at least".into()));
        }
        image.show(size);
        let stripe = image.stripe()?;
        if !read_only && !image.has_exclusive_lock() {
            tracing::warn!(
                "{address}: the image has no exclusive-lock feature: nothing keeps two hosts from writing it \
                 at once"
            );
        }
        let image = Arc::new(image);
        let inquirer = Inquirer::start(image.clone()).map_err(|source| DiskError::Io {
            path: address.to_string().into(),
            what: "cannot start a thread",
            source,
        })?;
        Ok(RbdDisk {
            locks: !read_only && image.has_exclusive_lock(),
            shared: Arc::new(Shared::new(image, inquirer, read_only, settings.caches)),
            discard: options.discard,
            watcher,
            stripe,
        })
    }

    /// The same, for whoever waits.
    pub(super) fn bytes(&self) -> Arc<dyn ImageFile> {
        self.shared.image.clone()
    }

    fn image(&self) -> &Image {
        &self.shared.image
    }
}

impl Disk for RbdDisk {
    fn info(&self) -> DiskInfo {
        let limits = |alignment| {
            let limits = RangeLimits {
                alignment,
                max_len: MAX_RANGE,
            };
            (!self.shared.read_only).then_some(limits)
        };
        DiskInfo {
            size: self.shared.size(),
            block_size: 512,
            physical_block_size: PHYSICAL,
            optimal_io_size: u32::try_from(self.stripe).unwrap_or(0),
            read_only: self.shared.read_only,
            write_cache: self.shared.caches,
            discard: limits(DISCARD_ALIGNMENT).filter(|_| self.discard),
            write_zeroes: limits(PHYSICAL),
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        if self.locks {
            self.image().lock()?;
        }
        // Others may have written it meanwhile.
        if self.shared.caches {
            self.image().forget()
        } else {
            Ok(())
        }
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        if self.shared.read_only {
            return Ok(());
        }
        let flushed = self.image().flush();
        // Whatever that has come to: it is in use no more.
        let unlocked = if self.locks {
            self.image().unlock()
        } else {
            Ok(())
        };
        flushed.and(unlocked)
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let now = self.shared.size();
        let Some(size) = to.wanted(now)? else {
            // What the image has by now.
            self.watcher.looks();
            let size = self.image().size()? & !511;
            self.shared.set_size(size);
            return Ok(size);
        };
        if size < now {
            self.shared.set_size(size);
            (to.settle)().inspect_err(|_| self.shared.set_size(now))?;
        }
        self.image()
            .resize(size)
            .inspect_err(|_| self.shared.set_size(now))?;
        self.shared.set_size(size);
        Ok(size)
    }

    fn watch_size(&self, watch: SizeWatch) {
        self.watcher.set(watch);
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let channel = RbdChannel::new(self.shared.clone(), cx);
        let channel = channel.map_err(|source| DiskError::Io {
            path: self.image().path().clone(),
            what: "cannot be served",
            source,
        })?;
        Ok(Box::new(channel))
    }
}
