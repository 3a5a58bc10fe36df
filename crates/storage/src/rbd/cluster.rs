//! A client connection to a Ceph cluster, and the images that it opens.

use super::address::Address;
use super::library::{Cluster as Handle, ImageHandle, Library, Pool, library};
use fathom_core::DiskError;
use fathom_units::cause;
use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::time::Duration;

/// Timeout for connecting to the monitors, unless the cluster's configuration sets another.
const CONNECT: Duration = Duration::from_secs(30);
/// Number of librados threads of each disk's client, besides those of its messenger and Fathom's
/// own. With two, the library's default, they wake each other, which costs a third of the CPU time
/// of a read.
const CLIENT_THREADS: &str = "1";

/// Settings of a cluster connection.
#[derive(Default)]
pub(super) struct Settings {
    /// Whether completed writes may stay in memory until a flush.
    pub(super) caches: bool,
    /// Time the cluster may take to reply to a request; None: unlimited.
    pub(super) timeout: Option<Duration>,
}

/// A client of the cluster. Dropping it disconnects, which gives up all of its locks.
pub(super) struct Cluster {
    pub(super) library: &'static Library,
    handle: Handle,
    pool: Pool,
}

// SAFETY: librados(3): the handles of a cluster and of a pool may be used by several threads. The
// pool's namespace is set before a second thread uses it.
unsafe impl Send for Cluster {}
// SAFETY: as for Send.
unsafe impl Sync for Cluster {}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: both are this value's own; open images keep the cluster alive.
        unsafe {
            if !self.pool.is_null() {
                (self.library.rados_ioctx_destroy)(self.pool);
            }
            (self.library.rados_shutdown)(self.handle);
        }
    }
}

/// Converts a result of Ceph's functions: a negative number is an errno.
pub(super) fn checked(result: i32) -> Result<(), std::io::Error> {
    match result {
        0.. => Ok(()),
        negative => Err(std::io::Error::from_raw_os_error(-negative)),
    }
}

/// Converts text of an address, which has been checked for zero bytes.
fn c_string(text: &str) -> CString {
    CString::new(text).expect("an address has no zero bytes")
}

fn pointer(text: Option<&CString>) -> *const libc::c_char {
    text.map_or(null(), |text| text.as_ptr())
}

/// Buffer size in bytes for the library's short texts.
const SHORT: usize = 256;

/// Returns a short text that a function of the library writes into a buffer.
pub(super) fn text(
    get: impl FnOnce(*mut libc::c_char, libc::size_t) -> libc::c_int,
) -> std::io::Result<String> {
    let mut text = [0_u8; SHORT];
    checked(get(text.as_mut_ptr().cast(), text.len()))?;
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

impl Cluster {
    /// Connects and opens the pool; blocking. The error is one line that says what to do.
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
        // SAFETY: the arguments are a string or null, and a place for the handle.
        let made = unsafe { (library.rados_create)(&mut handle, pointer(user.as_ref())) };
        checked(made).map_err(failed("cannot create Ceph's client"))?;
        let mut cluster = Cluster {
            library,
            handle,
            pool: null_mut(),
        };
        let conf = address.conf.as_deref().map(c_string);
        // SAFETY: the handle is open; the argument is a string or null.
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
        // SAFETY: the handle is connected; the arguments are a string and a place for the pool's
        // handle.
        let found =
            unsafe { (library.rados_ioctx_create)(handle, name.as_ptr(), &mut cluster.pool) };
        checked(found).map_err(failed("cannot open its pool"))?;
        if let Some(namespace) = address.namespace.as_deref().map(c_string) {
            // SAFETY: the pool is open; the argument is a string.
            unsafe { (library.rados_ioctx_set_namespace)(cluster.pool, namespace.as_ptr()) };
        }
        Ok(cluster)
    }

    /// Applies the disk's options, which take precedence over the configuration file.
    fn apply(&self, settings: &Settings) {
        self.set("rbd_cache", if settings.caches { "true" } else { "false" });
        if let Some(timeout) = settings.timeout {
            let seconds = timeout.as_secs_f64().to_string();
            self.set("rados_osd_op_timeout", &seconds);
            self.set("rados_mon_op_timeout", &seconds);
        }
    }

    /// Changes a setting that has the library's default value; the configuration file takes
    /// precedence.
    fn set_default(&self, key: &str, default: &str, value: &str) {
        let name = c_string(key);
        // SAFETY: the handle is open; the arguments are a string and a buffer of `len` bytes.
        let now = text(|base, len| unsafe {
            (self.library.rados_conf_get)(self.handle, name.as_ptr(), base, len)
        });
        if now.is_ok_and(|now| now == default) {
            self.set(key, value);
        }
    }

    /// Changes a setting. If the library does not know it, warns and continues.
    fn set(&self, key: &str, value: &str) {
        let (key, value) = (c_string(key), c_string(value));
        // SAFETY: the handle is open; the arguments are two strings.
        let set =
            unsafe { (self.library.rados_conf_set)(self.handle, key.as_ptr(), value.as_ptr()) };
        if let Err(error) = checked(set) {
            tracing::warn!(
                "Ceph's library rejected {key:?} = {value:?}: {}",
                cause(error)
            );
        }
    }

    /// Returns a text that identifies the pool among those of all clusters.
    pub(super) fn identity(&self) -> std::io::Result<String> {
        // SAFETY: the handle is connected, and the buffer has `len` bytes.
        let fsid =
            text(|base, len| unsafe { (self.library.rados_cluster_fsid)(self.handle, base, len) })?;
        // SAFETY: the pool is open.
        let pool = unsafe { (self.library.rados_ioctx_get_id)(self.pool) };
        Ok(format!("{fsid}/{pool}"))
    }

    /// Creates an image of 0 bytes, with the features that the cluster's configuration sets.
    /// Returns false if it exists already. Blocking.
    pub(super) fn create(&self, address: &Address) -> std::io::Result<bool> {
        let image = c_string(&address.image);
        // 0: the object size that the configuration sets.
        let mut order = 0;
        // SAFETY: the pool is open; the arguments are a string and a place for a number.
        match unsafe { (self.library.rbd_create)(self.pool, image.as_ptr(), 0, &mut order) } {
            there if there == -libc::EEXIST => Ok(false),
            result => checked(result).map(|()| true),
        }
    }

    /// Removes an image that no client has open; blocking.
    pub(super) fn remove(&self, address: &Address) -> std::io::Result<()> {
        let image = c_string(&address.image);
        // SAFETY: the pool is open; the argument is a string.
        checked(unsafe { (self.library.rbd_remove)(self.pool, image.as_ptr()) })
    }

    /// Opens an image, which the caller must close; blocking.
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
        // SAFETY: the pool is open; the arguments are strings or null, and a place for the handle.
        checked(unsafe { open(self.pool, image.as_ptr(), &mut handle, snapshot) })?;
        Ok(handle)
    }
}
