//! A connection to a Ceph cluster, and the images that it opens.

use super::address::Address;
use super::library::{Cluster as Handle, ImageHandle, Library, Pool, library};
use fathom_core::DiskError;
use fathom_units::cause;
use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::time::Duration;

/// Monitors get so long to answer, unless the cluster's configuration says otherwise.
const CONNECT: Duration = Duration::from_secs(30);
/// Of each disk's client, for what is neither its messenger's nor ours. A second one, which is the library's default,
/// costs a third of the CPU time of a read: they wake each other.
const CLIENT_THREADS: &str = "1";

/// What is asked for when a cluster is connected to.
#[derive(Default)]
pub(super) struct Settings {
    /// Completed writes may be in memory only.
    pub(super) caches: bool,
    /// How long the cluster may say nothing of a request; none: for ever.
    pub(super) timeout: Option<Duration>,
}

/// A client of the cluster; gone when this is dropped, with all that it has locked.
pub(super) struct Cluster {
    pub(super) library: &'static Library,
    handle: Handle,
    pool: Pool,
}

// SAFETY: librados(3): a cluster's handle may be used by several threads, and so may a pool's. The pool's
// namespace is set before there is a second one.
unsafe impl Send for Cluster {}
// SAFETY: as for Send.
unsafe impl Sync for Cluster {}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: both are this value's own; images have the cluster as long as they are open.
        unsafe {
            if !self.pool.is_null() {
                (self.library.rados_ioctx_destroy)(self.pool);
            }
            (self.library.rados_shutdown)(self.handle);
        }
    }
}

/// What Ceph says by a negative number.
pub(super) fn checked(result: i32) -> Result<(), std::io::Error> {
    match result {
        0.. => Ok(()),
        negative => Err(std::io::Error::from_raw_os_error(-negative)),
    }
}

/// Of an address that has been checked.
fn c_string(text: &str) -> CString {
    CString::new(text).expect("an address has no zero bytes")
}

fn pointer(text: Option<&CString>) -> *const libc::c_char {
    text.map_or(null(), |text| text.as_ptr())
}

/// Longer than the library's short texts.
const SHORT: usize = 256;

/// A short text that the library puts where it is told.
pub(super) fn text(
    get: impl FnOnce(*mut libc::c_char, libc::size_t) -> libc::c_int,
) -> std::io::Result<String> {
    let mut text = [0_u8; SHORT];
    checked(get(text.as_mut_ptr().cast(), text.len()))?;
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

impl Cluster {
    /// Connects, blocking, and finds the pool. The error is one line that says what to do.
    pub(super) fn connect(address: &Address, settings: &Settings) -> Result<Cluster, DiskError> {
        let path = PathBuf::from(address.to_string());
        let unusable = |problem| DiskError::Unusable {
            path: path.clone(),
            problem,
        };
        let failed = |what| {
            let path = path.clone();
            move |source| DiskError::Io { path, what, source }
        };
        let library = library().map_err(unusable)?;
        let user = address.user.as_deref().map(c_string);
        let mut handle = null_mut();
        // SAFETY: a string or none, and a place for the handle.
        let made = unsafe { (library.rados_create)(&mut handle, pointer(user.as_ref())) };
        checked(made).map_err(failed("cannot create Ceph's client"))?;
        let mut cluster = Cluster {
            library,
            handle,
            pool: null_mut(),
        };
        let conf = address.conf.as_deref().map(c_string);
        // SAFETY: the handle is open; a string or none.
        let read = unsafe { (library.rados_conf_read_file)(handle, pointer(conf.as_ref())) };
        checked(read).map_err(|error| {
            let file = address.conf.as_deref().unwrap_or("/etc/ceph/ceph.conf");
            unusable(format!(
                "cannot read the cluster's configuration {file}: {}; name it by ?conf=FILE",
                cause(error)
            ))
        })?;
        let timeout = CONNECT.as_secs().to_string();
        cluster.set_default("client_mount_timeout", "300", &timeout);
        cluster.set_default("librados_thread_count", "2", CLIENT_THREADS);
        cluster.apply(settings);
        // SAFETY: the handle is open.
        let connected = unsafe { (library.rados_connect)(handle) };
        checked(connected).map_err(failed("cannot connect to the cluster"))?;
        let name = c_string(&address.pool);
        // SAFETY: the handle is connected; a string, and a place for the pool's handle.
        let found =
            unsafe { (library.rados_ioctx_create)(handle, name.as_ptr(), &mut cluster.pool) };
        checked(found).map_err(failed("cannot open its pool"))?;
        if let Some(namespace) = address.namespace.as_deref().map(c_string) {
            // SAFETY: the pool is open; a string.
            unsafe { (library.rados_ioctx_set_namespace)(cluster.pool, namespace.as_ptr()) };
        }
        Ok(cluster)
    }

    /// The disk's options count for more than what the configuration file says.
    fn apply(&self, settings: &Settings) {
        self.set("rbd_cache", if settings.caches { "true" } else { "false" });
        if let Some(timeout) = settings.timeout {
            let seconds = timeout.as_secs_f64().to_string();
            self.set("rados_osd_op_timeout", &seconds);
            self.set("rados_mon_op_timeout", &seconds);
        }
    }

    /// Sets what is as the library has it by itself: the configuration file counts for more.
    fn set_default(&self, key: &str, default: &str, value: &str) {
        let name = c_string(key);
        // SAFETY: the handle is open; a string, and there is room for so many bytes.
        let now = text(|base, len| unsafe {
            (self.library.rados_conf_get)(self.handle, name.as_ptr(), base, len)
        });
        if now.is_ok_and(|now| now == default) {
            self.set(key, value);
        }
    }

    /// A library that does not know a setting goes on without it.
    fn set(&self, key: &str, value: &str) {
        let (key, value) = (c_string(key), c_string(value));
        // SAFETY: the handle is open; two strings.
        let set =
            unsafe { (self.library.rados_conf_set)(self.handle, key.as_ptr(), value.as_ptr()) };
        if let Err(error) = checked(set) {
            tracing::warn!(
                "Ceph's library rejected {key:?} = {value:?}: {}",
                cause(error)
            );
        }
    }

    /// What tells its pool from all others of all clusters.
    pub(super) fn identity(&self) -> std::io::Result<String> {
        // SAFETY: the handle is connected, and there is room for so many bytes.
        let fsid =
            text(|base, len| unsafe { (self.library.rados_cluster_fsid)(self.handle, base, len) })?;
        // SAFETY: the pool is open.
        let pool = unsafe { (self.library.rados_ioctx_get_id)(self.pool) };
        Ok(format!("{fsid}/{pool}"))
    }

    /// Makes an image of no bytes, with the features that the cluster's configuration says; false: it is there.
    /// Blocking.
    pub(super) fn create(&self, address: &Address) -> std::io::Result<bool> {
        let image = c_string(&address.image);
        // As large objects as the configuration says.
        let mut order = 0;
        // SAFETY: the pool is open; a string, and a place for a number.
        match unsafe { (self.library.rbd_create)(self.pool, image.as_ptr(), 0, &mut order) } {
            there if there == -libc::EEXIST => Ok(false),
            result => checked(result).map(|()| true),
        }
    }

    /// Removes an image that nobody has open; blocking.
    pub(super) fn remove(&self, address: &Address) -> std::io::Result<()> {
        let image = c_string(&address.image);
        // SAFETY: the pool is open; a string.
        checked(unsafe { (self.library.rbd_remove)(self.pool, image.as_ptr()) })
    }

    /// An image, to be closed; blocking.
    pub(super) fn open(&self, address: &Address, read_only: bool) -> std::io::Result<ImageHandle> {
        let image = c_string(&address.image);
        let snapshot = address.snapshot.as_deref().map(c_string);
        let snapshot: Option<&CStr> = snapshot.as_deref();
        let snapshot = snapshot.map_or(null(), CStr::as_ptr);
        let open = match read_only {
            true => self.library.rbd_open_read_only,
            false => self.library.rbd_open,
        };
        let mut handle = null_mut();
        // SAFETY: the pool is open; strings or none, and a place for the handle.
        checked(unsafe { open(self.pool, image.as_ptr(), &mut handle, snapshot) })?;
        Ok(handle)
    }
}
