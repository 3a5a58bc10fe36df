//! The functions of Ceph's library that a disk needs. The library is loaded when the first disk of
//! this kind is opened, so that hosts without such disks need not have it installed. The library's
//! C interface is stable: see rbd/librbd.h and rados/librados.h.

use fathom_units::cause;
use libc::{c_char, c_int, c_void, iovec, size_t, ssize_t};
use libloading::os::unix::Library as Loaded;
use std::sync::OnceLock;

/// librbd loads librados, whose functions are found through it, too.
const FILE: &str = "librbd.so.1";

pub(super) type Cluster = *mut c_void;
pub(super) type Pool = *mut c_void;
pub(super) type ImageHandle = *mut c_void;
pub(super) type Completion = *mut c_void;

/// Callback of a completion; its second argument is the completion's own.
pub(super) type Ended = unsafe extern "C" fn(Completion, *mut c_void);
/// Callback for a change of the image's header.
pub(super) type Changed = unsafe extern "C" fn(*mut c_void);
/// Callback for a range and whether it has data.
pub(super) type Extent = unsafe extern "C" fn(u64, size_t, c_int, *mut c_void) -> c_int;

/// rbd_lock_mode_t
pub(super) const LOCK_EXCLUSIVE: c_int = 0;
/// rbd/features.h
pub(super) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// rbd_write_zeroes_flags_t
pub(super) const ZEROES_STAY_ALLOCATED: c_int = 1;

/// rbd_image_watcher_t: a client that has an image open for writing.
#[repr(C)]
#[derive(Clone)]
pub(super) struct Watcher {
    pub(super) address: *mut c_char,
    pub(super) id: i64,
    pub(super) cookie: u64,
}

/// Declares the functions and a constructor that looks them all up.
macro_rules! functions {
    ($($name:ident($($type:ty),*) $(-> $result:ty)?;)*) => {
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
            /// The library that contains the functions.
            _loaded: Loaded,
        }

        impl Library {
            fn of(loaded: Loaded) -> Result<Library, libloading::Error> {
                Ok(Library {
                    $($name: {
                        // SAFETY: the type is that of the function in Ceph's headers.
                        let symbol = unsafe { loaded.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol?
                    },)*
                    _loaded: loaded,
                })
            }
        }
    };
}

functions! {
    rados_create(*mut Cluster, *const c_char) -> c_int;
    rados_conf_read_file(Cluster, *const c_char) -> c_int;
    rados_conf_get(Cluster, *const c_char, *mut c_char, size_t) -> c_int;
    rados_conf_set(Cluster, *const c_char, *const c_char) -> c_int;
    rados_connect(Cluster) -> c_int;
    rados_cluster_fsid(Cluster, *mut c_char, size_t) -> c_int;
    rados_shutdown(Cluster);
    rados_ioctx_create(Cluster, *const c_char, *mut Pool) -> c_int;
    rados_ioctx_set_namespace(Pool, *const c_char);
    rados_ioctx_get_id(Pool) -> i64;
    rados_ioctx_destroy(Pool);
    rbd_create(Pool, *const c_char, u64, *mut c_int) -> c_int;
    rbd_remove(Pool, *const c_char) -> c_int;
    rbd_open(Pool, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd_open_read_only(Pool, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd_close(ImageHandle) -> c_int;
    rbd_get_id(ImageHandle, *mut c_char, size_t) -> c_int;
    rbd_get_size(ImageHandle, *mut u64) -> c_int;
    rbd_get_features(ImageHandle, *mut u64) -> c_int;
    rbd_get_stripe_unit(ImageHandle, *mut u64) -> c_int;
    rbd_resize(ImageHandle, u64) -> c_int;
    rbd_read(ImageHandle, u64, size_t, *mut c_char) -> ssize_t;
    rbd_write(ImageHandle, u64, size_t, *const c_char) -> ssize_t;
    rbd_discard(ImageHandle, u64, u64) -> c_int;
    rbd_flush(ImageHandle) -> c_int;
    rbd_invalidate_cache(ImageHandle) -> c_int;
    rbd_lock_acquire(ImageHandle, c_int) -> c_int;
    rbd_lock_release(ImageHandle) -> c_int;
    rbd_lock_get_owners(ImageHandle, *mut c_int, *mut *mut c_char, *mut size_t) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, size_t);
    rbd_list_lockers(
        ImageHandle, *mut c_int, *mut c_char, *mut size_t, *mut c_char, *mut size_t, *mut c_char, *mut size_t,
        *mut c_char, *mut size_t
    ) -> ssize_t;
    rbd_watchers_list(ImageHandle, *mut Watcher, *mut size_t) -> c_int;
    rbd_watchers_list_cleanup(*mut Watcher, size_t);
    rbd_update_watch(ImageHandle, *mut u64, Changed, *mut c_void) -> c_int;
    rbd_update_unwatch(ImageHandle, u64) -> c_int;
    rbd_diff_iterate2(
        ImageHandle, *const c_char, u64, u64, u8, u8, Extent, *mut c_void
    ) -> c_int;
    rbd_aio_create_completion(*mut c_void, Ended, *mut Completion) -> c_int;
    rbd_aio_get_return_value(Completion) -> ssize_t;
    rbd_aio_release(Completion);
    rbd_aio_readv(ImageHandle, *const iovec, c_int, u64, Completion) -> c_int;
    rbd_aio_writev(ImageHandle, *const iovec, c_int, u64, Completion) -> c_int;
    rbd_aio_discard(ImageHandle, u64, u64, Completion) -> c_int;
    rbd_aio_write_zeroes(ImageHandle, u64, size_t, Completion, c_int, c_int) -> c_int;
    rbd_aio_flush(ImageHandle, Completion) -> c_int;
}

/// Returns the library, loading it at the first call. The error is one line that says what to do.
pub(super) fn library() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    // SAFETY: the library's initializers are those that every program with Ceph runs.
    let loaded = unsafe { Loaded::new(FILE) }.map_err(|error| {
        format!(
            "cannot load Ceph's library ({}); install it (Debian: librbd1)",
            cause(error)
        )
    })?;
    let library = Library::of(loaded).map_err(|error| {
        format!(
            "Ceph's library is too old ({}); install version 16 (Pacific) or newer",
            cause(error)
        )
    })?;
    Ok(LIBRARY.get_or_init(|| library))
}
