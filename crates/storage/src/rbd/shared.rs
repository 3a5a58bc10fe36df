//! State shared by the disk and all its channels.

use super::image::Image;
use super::inquirer::Inquirer;
use fathom_core::SizeWatch;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Notifies the disk's owner that another client has changed the image's size.
#[derive(Default)]
pub(super) struct SizeWatcher {
    watch: OnceLock<SizeWatch>,
    /// Whether the owner was notified and has not looked since.
    is_told: AtomicBool,
}

impl SizeWatcher {
    pub(super) fn set(&self, watch: SizeWatch) {
        let _ = self.watch.set(watch);
    }

    /// Notifies the owner, unless it has not looked since the last notification.
    pub(super) fn tell(&self) {
        if let Some(watch) = self.watch.get()
            && !self.is_told.swap(true, Ordering::SeqCst)
        {
            watch();
        }
    }

    /// Records that the owner looks at the size now.
    pub(super) fn looks(&self) {
        self.is_told.store(false, Ordering::SeqCst);
    }
}

pub(super) struct Shared {
    pub(super) image: Arc<Image>,
    pub(super) inquirer: Inquirer,
    pub(super) read_only: bool,
    /// Whether completed writes may be in this process's memory only.
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

    /// Handles a failed request: logs once if the client was blocklisted.
    pub(super) fn has_failed(&self, errno: i32) {
        // Ceph's EBLOCKLISTED is ESHUTDOWN.
        if errno == libc::ESHUTDOWN && !self.is_shut_out.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "{}: another client broke the lock of this server and excluded it from the \
                 cluster; all requests fail until the disk is removed and added again",
                self.image.path().display()
            );
        }
    }
}
