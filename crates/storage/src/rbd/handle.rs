//! One opening of an image.

use super::address::Address;
use super::cluster::Cluster;
use super::library::ImageHandle;
use fathom_core::DiskError;
use std::ffi::c_void;
use std::sync::Arc;

/// What is told that the image has changed, by a thread of the library that must not wait.
pub(super) type Notify = Arc<dyn Fn() + Send + Sync>;

/// An open image; closed when this is dropped. The library keeps with it what the image is like. It hears of changes
/// only if it was opened for writing.
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
        // SAFETY: the image is open, and nothing of it is in flight: channels have this as long as
        // anything is. After `unwatch` the notification is not called any more.
        unsafe {
            if let Some((watch, _)) = self.watch {
                (library.rbd_update_unwatch)(self.raw, watch);
            }
            (library.rbd_close)(self.raw);
        }
    }
}

/// The image is not what it was when it was opened: its size, say.
unsafe extern "C" fn changed(argument: *mut c_void) {
    // SAFETY: the argument that the watch was made with, which lives longer.
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

    /// For the library's functions, as long as this lives.
    pub(super) fn raw(&self) -> ImageHandle {
        self.raw
    }

    /// Has `notify` called when the image's size, or something else of it, has changed; a negative errno.
    pub(super) fn watch(&mut self, notify: Notify) -> i32 {
        let notify = Box::new(notify);
        let argument = (&raw const *notify).cast_mut().cast();
        let mut watch = 0;
        // SAFETY: the image is open; the argument stays where it is until the watch has ended.
        let watched = unsafe {
            (self.cluster.library.rbd_update_watch)(self.raw, &mut watch, changed, argument)
        };
        if watched >= 0 {
            self.watch = Some((watch, notify));
        }
        watched
    }
}
