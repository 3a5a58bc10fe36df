//! An open handle of an image.

use super::address::Address;
use super::cluster::Cluster;
use super::library::ImageHandle;
use fathom_core::DiskError;
use std::ffi::c_void;
use std::sync::Arc;

/// Called when the image has changed, by a thread of the library, which must not block.
pub(super) type Notify = Arc<dyn Fn() + Send + Sync>;

/// An open handle, closed when this value is dropped. The library stores the image's metadata with
/// it, and updates that only if the image was opened for writing.
pub(super) struct Handle {
    raw: ImageHandle,
    cluster: Arc<Cluster>,
    watch: Option<(u64, Box<Notify>)>,
}

// SAFETY: librbd's functions may be called for one image by several threads at once.
unsafe impl Send for Handle {}
// SAFETY: as for Send.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        let library = self.cluster.library;
        // SAFETY: the image is open, and nothing is in flight on it: channels keep this value while
        // they have anything in flight. After `unwatch` the notification is not called any more.
        unsafe {
            if let Some((watch, _)) = self.watch {
                (library.rbd_update_unwatch)(self.raw, watch);
            }
            (library.rbd_close)(self.raw);
        }
    }
}

/// Callback of the library: the image's size or other metadata has changed.
unsafe extern "C" fn changed(argument: *mut c_void) {
    // SAFETY: the argument was passed when the watch was made, and outlives the watch.
    let notify = unsafe { &*argument.cast_const().cast::<Notify>() };
    notify();
}

impl Handle {
    /// Opens the image, blocking. The error is one line that says what to do.
    pub(super) fn open(
        cluster: &Arc<Cluster>,
        address: &Address,
        read_only: bool,
    ) -> Result<Handle, DiskError> {
        let raw = cluster.open(address, read_only);
        let raw = raw.map_err(|source| DiskError::Io {
            path: address.to_string().into(),
            what: match address.snapshot {
                Some(_) => "cannot open the image or its snapshot",
                None => "cannot open the image",
            },
            source,
        })?;
        Ok(Handle {
            raw,
            cluster: cluster.clone(),
            watch: None,
        })
    }

    /// Returns the raw handle for the library's functions, valid until this value is dropped.
    pub(super) fn raw(&self) -> ImageHandle {
        self.raw
    }

    /// Makes the library call `notify` when the image's size or other metadata changes. Returns a
    /// negative errno on failure.
    pub(super) fn watch(&mut self, notify: Notify) -> i32 {
        let notify = Box::new(notify);
        let argument = (&raw const *notify).cast_mut().cast();
        let mut watch = 0;
        // SAFETY: the image is open; the argument stays in place until the watch has ended.
        let watched = unsafe {
            (self.cluster.library.rbd_update_watch)(self.raw, &mut watch, changed, argument)
        };
        if watched >= 0 {
            self.watch = Some((watch, notify));
        }
        watched
    }
}
