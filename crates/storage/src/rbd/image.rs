//! An open image.

use super::address::Address;
use super::cluster::{Cluster, Settings, checked, text};
use super::handle::{Handle, Notify};
use super::library::{FEATURE_EXCLUSIVE_LOCK, ImageHandle, Library};
use fathom_core::DiskError;
use fathom_files::ImageFile;
use parking_lot::Mutex;
use std::ffi::{c_int, c_void};
use std::io;
use std::path::PathBuf;
use std::ptr::null;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An image of a connected cluster.
pub(super) struct Image {
    /// Present handle of the image. `turn` counts the changes of handle.
    handle: Mutex<Arc<Handle>>,
    turn: AtomicU64,
    /// Former handles that channels may still use. A thread that may block closes them.
    before: Mutex<Vec<Arc<Handle>>>,
    cluster: Arc<Cluster>,
    address: Address,
    path: PathBuf,
    features: u64,
    /// Whether the image holds an image of a format such as qcow2 and grows as needed: bytes beyond
    /// its end read as zeroes.
    grows: bool,
    /// Number of bytes that requests may access, see [`Image::reach`].
    shown: AtomicU64,
}

impl Image {
    /// Connects and opens the image, for reading only if `notify` is None; blocking. The error is
    /// one line that says what to do.
    pub(super) fn open(
        address: &Address,
        notify: Option<Notify>,
        grows: bool,
        settings: &Settings,
    ) -> Result<Image, DiskError> {
        let cluster = Arc::new(Cluster::connect(address, settings)?);
        let mut handle = Handle::open(&cluster, address, notify.is_none())?;
        let watched = notify.map_or(0, |notify| handle.watch(notify));
        let mut image = Image {
            handle: Mutex::new(Arc::new(handle)),
            turn: AtomicU64::new(0),
            before: Mutex::default(),
            cluster,
            address: address.clone(),
            path: address.to_string().into(),
            features: 0,
            grows,
            shown: AtomicU64::new(0),
        };
        image.result(watched, "cannot watch the image for changes")?;
        image.features =
            image.number(image.library().rbd_get_features, "cannot read its features")?;
        Ok(image)
    }

    pub(super) fn library(&self) -> &'static Library {
        self.cluster.library
    }

    /// Returns the present handle.
    pub(super) fn handle(&self) -> Arc<Handle> {
        self.handle.lock().clone()
    }

    /// Returns a new handle for reading that has the image's present state; blocking. If the name
    /// leads to another image or to none, warns and returns the present handle.
    pub(super) fn look(&self) -> Result<Arc<Handle>, DiskError> {
        let what = match Handle::open(&self.cluster, &self.address, true) {
            Ok(now) if self.id(&now)? == self.id(&self.handle())? => return Ok(Arc::new(now)),
            Ok(_) => "the image was replaced by another image",
            Err(DiskError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                "the image was removed or renamed"
            }
            Err(error) => return Err(error),
        };
        let path = self.path.display();
        tracing::warn!(
            "{path}: {what} since it was opened; the open image is still served; restart the \
             server to serve the image that has this name now"
        );
        Ok(self.handle())
    }

    /// Replaces the handle. Channels must have nothing in flight on the former one; they notice the
    /// change by the [turn](Image::turn). May block.
    pub(super) fn go_on_with(&self, handle: Arc<Handle>) {
        let mut all = self.before.lock();
        let before = std::mem::replace(&mut *self.handle.lock(), handle.clone());
        if Arc::ptr_eq(&before, &handle) {
            return;
        }
        self.turn.fetch_add(1, Ordering::Release);
        // Former handles that no channel has any more are closed here, because a worker must not
        // wait for that.
        all.retain(|handle| Arc::strong_count(handle) > 1);
        all.push(before);
    }

    /// Returns a number that changes with every replacement of the handle.
    #[inline]
    pub(super) fn turn(&self) -> u64 {
        self.turn.load(Ordering::Acquire)
    }

    /// Returns the image's address as users write it.
    pub(super) fn path(&self) -> &PathBuf {
        &self.path
    }

    fn number(
        &self,
        get: unsafe extern "C" fn(ImageHandle, *mut u64) -> c_int,
        what: &'static str,
    ) -> Result<u64, DiskError> {
        let mut number = 0;
        // SAFETY: the image is open, and the argument is a place for the number.
        self.result(unsafe { get(self.handle().raw(), &mut number) }, what)?;
        Ok(number)
    }

    pub(super) fn result(&self, result: c_int, what: &'static str) -> Result<(), DiskError> {
        checked(result).map_err(|source| DiskError::Io {
            path: self.path.clone(),
            what,
            source,
        })
    }

    /// Returns a text that identifies the image among those of all clusters, however its address is
    /// written.
    pub(super) fn identity(&self) -> Result<String, DiskError> {
        let pool = self.cluster.identity().map_err(self.unknown())?;
        let id = self.id(&self.handle())?;
        let (namespace, snapshot) = (&self.address.namespace, &self.address.snapshot);
        Ok(format!("{pool}/{namespace:?}/{id}@{snapshot:?}"))
    }

    /// Returns the ID of a handle's image, which is unique in its pool and namespace.
    fn id(&self, handle: &Handle) -> Result<String, DiskError> {
        // SAFETY: the image is open, and the buffer has `len` bytes.
        let id = text(|base, len| unsafe { (self.library().rbd_get_id)(handle.raw(), base, len) });
        id.map_err(self.unknown())
    }

    fn unknown(&self) -> impl FnOnce(io::Error) -> DiskError {
        let path = self.path.clone();
        move |source| DiskError::Io {
            path,
            what: "cannot read its identity",
            source,
        }
    }

    /// Returns whether the image is a snapshot, which never changes.
    pub(super) fn is_snapshot(&self) -> bool {
        self.address.snapshot.is_some()
    }

    /// Returns the image's size in bytes, which may not be a multiple of 512.
    pub(super) fn size(&self) -> Result<u64, DiskError> {
        self.number(self.library().rbd_get_size, "cannot read its size")
    }

    /// Returns the stripe unit in bytes: the length best written at a time.
    pub(super) fn stripe(&self) -> Result<u64, DiskError> {
        self.number(
            self.library().rbd_get_stripe_unit,
            "cannot read its striping",
        )
    }

    /// Returns how many of `size` bytes requests may access: whole sectors, unless the image grows.
    pub(super) fn reach(&self, size: u64) -> u64 {
        if self.grows { size } else { size & !511 }
    }

    /// Returns the number of bytes that requests may access, see [`Image::show`].
    pub(super) fn shown(&self) -> u64 {
        self.shown.load(Ordering::Relaxed)
    }

    /// Sets the number of bytes that requests may access.
    pub(super) fn show(&self, bytes: u64) {
        self.shown.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn has_exclusive_lock(&self) -> bool {
        self.features & FEATURE_EXCLUSIVE_LOCK != 0
    }

    /// Flushes the image; blocking.
    pub(super) fn flush(&self) -> Result<(), DiskError> {
        // SAFETY: the image is open.
        self.result(
            unsafe { (self.library().rbd_flush)(self.handle().raw()) },
            "cannot flush",
        )
    }

    /// Drops the library's cache of the image; blocking.
    pub(super) fn forget(&self) -> Result<(), DiskError> {
        // SAFETY: the image is open.
        let result = unsafe { (self.library().rbd_invalidate_cache)(self.handle().raw()) };
        self.result(result, "cannot drop its cache")
    }

    /// Resizes the image; blocking.
    pub(super) fn resize(&self, size: u64) -> Result<(), DiskError> {
        // SAFETY: the image is open.
        self.result(
            unsafe { (self.library().rbd_resize)(self.handle().raw(), size) },
            "cannot resize the image",
        )
    }

    /// Returns the ranges that have data, at most `most` of them, and whether there are more. The
    /// gaps between the ranges read as zeroes. Blocking.
    pub(super) fn data(
        &self,
        at: u64,
        len: u64,
        most: usize,
    ) -> io::Result<(Vec<(u64, u64)>, bool)> {
        let mut found = Found {
            ranges: Vec::new(),
            most,
            is_full: false,
        };
        let argument = (&raw mut found).cast();
        let iterate = self.library().rbd_diff_iterate2;
        // SAFETY: the image is open; the callback receives the argument that it expects.
        match unsafe { iterate(self.handle().raw(), null(), at, len, 1, 1, add, argument) } {
            _ if found.is_full => Ok((found.ranges, true)),
            result => checked(result).map(|()| (found.ranges, false)),
        }
    }

    pub(super) fn unusable(&self, problem: String) -> DiskError {
        DiskError::Unusable {
            path: self.path.clone(),
            problem,
        }
    }
}

impl ImageFile for Image {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let there = ImageFile::len(self)?.saturating_sub(offset);
        let there = usize::try_from(there).unwrap_or(usize::MAX).min(buf.len());
        let (head, rest) = buf.split_at_mut(there);
        rest.fill(0);
        let base = head.as_mut_ptr().cast();
        // SAFETY: the image is open, and the buffer has room for that many bytes.
        let read =
            unsafe { (self.library().rbd_read)(self.handle().raw(), offset, head.len(), base) };
        moved(read, head.len())
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        // The library would write only as many bytes as fit into the image.
        let end = offset.saturating_add(buf.len() as u64);
        if end > ImageFile::len(self)? {
            self.set_len(end)?;
        }
        let base = buf.as_ptr().cast();
        // SAFETY: the image is open, and the buffer has that many bytes.
        let written =
            unsafe { (self.library().rbd_write)(self.handle().raw(), offset, buf.len(), base) };
        moved(written, buf.len())
    }

    fn len(&self) -> io::Result<u64> {
        let mut len = 0;
        // SAFETY: the image is open, and the argument is a place for the number.
        checked(unsafe { (self.library().rbd_get_size)(self.handle().raw(), &mut len) })?;
        Ok(len)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if !self.grows {
            return match len <= ImageFile::len(self)? {
                true => Ok(()),
                false => Err(io::ErrorKind::StorageFull.into()),
            };
        }
        // Callers shorten the image only while nothing is in flight.
        // SAFETY: the image is open.
        checked(unsafe { (self.library().rbd_resize)(self.handle().raw(), len) })?;
        self.show(self.reach(len));
        Ok(())
    }

    fn grows(&self) -> bool {
        self.grows
    }

    fn sync(&self) -> io::Result<()> {
        // SAFETY: the image is open.
        checked(unsafe { (self.library().rbd_flush)(self.handle().raw()) })
    }

    fn check_allocate(&self) -> io::Result<()> {
        let problem = "Ceph does not support reserving space";
        Err(io::Error::new(io::ErrorKind::Unsupported, problem))
    }

    fn allocate(&self, _: u64, _: u64) -> io::Result<()> {
        self.check_allocate()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        // SAFETY: the image is open.
        checked(unsafe { (self.library().rbd_discard)(self.handle().raw(), offset, len) })
    }

    fn run_at(&self, offset: u64) -> (bool, u64) {
        let len = ImageFile::len(self).map_or(0, |len| len.saturating_sub(offset));
        if len == 0 {
            return (true, u64::MAX);
        }
        let len = len.min(MAX_RUN);
        match self.data(offset, len, 1) {
            Ok((data, _)) => match data.first() {
                Some((start, len)) if *start <= offset => (false, start + len),
                Some((start, _)) => (true, *start),
                None => (true, offset + len),
            },
            Err(_) => (false, u64::MAX),
        }
    }

    fn forget_cache(&self) {
        // The call is only advice, so its failure is ignored.
        let _ = self.forget();
    }
}

/// Maximum length in bytes of one search for data.
const MAX_RUN: u64 = 4 << 30;

/// Checks the result of a read or write of `len` bytes.
fn moved(result: isize, len: usize) -> io::Result<()> {
    match usize::try_from(result) {
        Ok(bytes) if bytes == len => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::from_raw_os_error((-result) as i32)),
    }
}

/// Collects the ranges of data that an iteration reports.
struct Found {
    ranges: Vec<(u64, u64)>,
    most: usize,
    is_full: bool,
}

unsafe extern "C" fn add(at: u64, len: usize, exists: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: this is the argument with which the iteration was started; nothing else uses it
    // meanwhile.
    let found = unsafe { &mut *argument.cast::<Found>() };
    if exists == 0 {
        return 0;
    }
    // Merges adjacent ranges, which are reported object by object.
    if let Some((start, before)) = found.ranges.last_mut()
        && *start + *before == at
    {
        *before += len as u64;
        return 0;
    }
    found.is_full = found.ranges.len() == found.most;
    if found.is_full {
        return -libc::ECANCELED;
    }
    found.ranges.push((at, len as u64));
    0
}
