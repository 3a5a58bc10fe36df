//! What the disk and all its channels know.

use super::image::Image;
use super::inquirer::Inquirer;
use fathom_core::SizeWatch;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Who wants to hear that the image has another size, by others' doing.
#[derive(Default)]
pub(super) struct SizeWatcher {
    watch: OnceLock<SizeWatch>,
    /// It has heard of it, and not looked since.
    is_told: AtomicBool,
}

impl SizeWatcher {
    pub(super) fn set(&self, watch: SizeWatch) {
        let _ = self.watch.set(watch);
    }

    /// The image has changed in some way.
    pub(super) fn tell(&self) {
        if let Some(watch) = self.watch.get()
            && !self.is_told.swap(true, Ordering::SeqCst)
        {
            watch();
        }
    }

    /// It looks now.
    pub(super) fn looks(&self) {
        self.is_told.store(false, Ordering::SeqCst);
    }
}

pub(super) struct Shared {
    pub(super) image: Arc<Image>,
    pub(super) inquirer: Inquirer,
    pub(super) read_only: bool,
    /// Completed writes may be in this process's memory only.
    pub(super) caches: bool,
    is_shut_out: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        image: Arc<Image>,
        inquirer: Inquirer,
        read_only: bool,
        caches: bool,
    ) -> Shared {
        Shared {
            image,
            inquirer,
            read_only,
            caches,
            is_shut_out: AtomicBool::new(false),
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.image.shown()
    }

    pub(super) fn set_size(&self, size: u64) {
        self.image.show(size);
    }

    /// A request has.
    pub(super) fn has_failed(&self, errno: i32) {
        // What Ceph calls EBLOCKLISTED.
        if errno == libc::ESHUTDOWN && !self.is_shut_out.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "{}: another client broke the lock of this server and excluded it from the \
                 cluster; all requests fail until the disk is removed and added again",
                self.image.path().display()
            );
        }
    }
}
