//! A Ceph image as a disk.

use super::address::Address;
use super::channel::RbdChannel;
use super::cluster::Settings;
use super::handle::Notify;
use super::image::Image;
use super::inquirer::Inquirer;
use super::shared::{Shared, SizeWatcher};
use crate::file::Cache;
use crate::kind::OpenOptions;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, RangeLimits, Resize, SizeWatch};
use fathom_files::ImageFile;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum length in bytes of a discard or write zeroes; each object in the range is an operation.
const MAX_RANGE: u64 = 1 << 30;
/// Alignment in bytes below which OSDs do not free space (rbd_discard_granularity_bytes).
const DISCARD_ALIGNMENT: u32 = 64 << 10;
/// Number of bytes that OSDs write atomically (bluestore_min_alloc_size).
const PHYSICAL: u32 = 4096;

/// How the disk treats the image's exclusive lock while it is in use.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lock {
    Taken,
    /// The image is only read, and the disk is refused while another client has locked it.
    Respected,
    Ignored,
}

/// An image of a Ceph cluster.
pub struct RbdDisk {
    shared: Arc<Shared>,
    discard: bool,
    /// Stripe unit in bytes: the length that an object receives at a time.
    stripe: u64,
    lock: Lock,
    /// Whether the lock is kept until the image is closed, even after deactivation.
    keeps_lock: bool,
    has_lock: AtomicBool,
    watcher: Arc<SizeWatcher>,
}

impl RbdDisk {
    pub(super) fn open(address: &Address, options: &OpenOptions) -> Result<RbdDisk, DiskError> {
        let read_only = options.read_only;
        if address.snapshot.is_some() && !read_only {
            return Err(DiskError::Unusable {
                path: address.to_string().into(),
                problem: match options.patient {
                    true => "snapshots are read-only; pass --readonly".into(),
                    false => "snapshots are read-only".into(),
                },
            });
        }
        let settings = Settings {
            caches: options.cache == Cache::Writeback,
            timeout: options.server_timeout.and_then(|timeout| timeout.0),
        };
        let watcher = Arc::new(SizeWatcher::default());
        let notify: Option<Notify> = (!read_only).then(|| {
            let watcher = watcher.clone();
            Arc::new(move || watcher.tell()) as _
        });
        let image = Image::open(address, notify, options.growable, &settings)?;
        let size = image.reach(image.size()?);
        if size == 0 && !options.growable {
            return Err(
                image.unusable("the image is empty; a disk needs at least 512 bytes".into())
            );
        }
        image.show(size);
        let stripe = image.stripe()?;
        if !read_only && !image.has_exclusive_lock() {
            tracing::warn!(
                "{address}: the image lacks the exclusive-lock feature, so two hosts could write \
                 it at the same time"
            );
        }
        let image = Arc::new(image);
        let inquirer = Inquirer::start(image.clone()).map_err(|source| DiskError::Io {
            path: address.to_string().into(),
            what: "cannot start a thread",
            source,
        })?;
        Ok(RbdDisk {
            lock: match image.has_exclusive_lock() {
                true if !read_only => Lock::Taken,
                true if address.snapshot.is_none() && !options.force_share => Lock::Respected,
                _ => Lock::Ignored,
            },
            keeps_lock: options.keeps_lock,
            has_lock: AtomicBool::new(false),
            shared: Arc::new(Shared::new(image, inquirer, read_only, settings.caches)),
            discard: options.discard,
            watcher,
            stripe,
        })
    }

    /// See [`Image::identity`].
    pub(super) fn identity(&self) -> Result<String, DiskError> {
        self.image().identity()
    }

    /// Returns the image as a file with blocking access.
    pub(super) fn bytes(&self) -> Arc<dyn ImageFile> {
        self.shared.image.clone()
    }

    fn image(&self) -> &Image {
        &self.shared.image
    }

    /// Opens a read-only image again: the library does not notify readers of changes.
    fn read_anew(&self) -> Result<(), DiskError> {
        let image = self.image();
        let handle = image.look()?;
        if self.lock == Lock::Respected {
            image.refuse_locked(&handle, "; --force-share reads it nevertheless")?;
        }
        image.go_on_with(handle);
        if !image.grows() && image.reach(image.size()?) != self.shared.size() {
            // The watcher's owner reads the new size by a resize.
            self.watcher.tell();
        }
        Ok(())
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
        match self.lock {
            Lock::Taken if self.has_lock.load(Ordering::Relaxed) => {}
            Lock::Taken => {
                self.image().lock()?;
                self.has_lock.store(true, Ordering::Relaxed);
            }
            Lock::Respected | Lock::Ignored => {}
        }
        if self.shared.read_only && !self.image().is_snapshot() {
            self.read_anew()?;
        }
        if self.image().grows() {
            // Another client may have lengthened the image and written data there.
            let size = self.image().reach(self.image().size()?);
            self.shared.set_size(size);
        }
        // Other clients may have written to the image since the last activation.
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
        // Even if the flush failed, the image is not in use any more.
        let unlocked = match self.has_lock.load(Ordering::Relaxed) && !self.keeps_lock {
            true => {
                self.has_lock.store(false, Ordering::Relaxed);
                self.image().unlock()
            }
            false => Ok(()),
        };
        flushed.and(unlocked)
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let now = self.shared.size();
        let Some(size) = to.wanted(now)? else {
            // Adopts the image's present size.
            self.watcher.looks();
            let size = self.image().reach(self.image().size()?);
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
            what: "cannot start a worker's channel",
            source,
        })?;
        Ok(Box::new(channel))
    }
}
