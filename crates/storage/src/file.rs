//! A disk in a file or on a block device.

mod align;
mod channel;
#[cfg(test)]
mod channel_tests;
mod flushes;
mod inline;
mod marked;
mod open;
mod pieces;
mod place;
mod plan;
pub(crate) mod report;
mod resize;
mod status;
mod transfer;

use crate::engine::EngineKind;
use crate::ranges::Ranges;
use channel::FileChannel;
use fathom_core::{Channel, Cx, Disk, DiskError, DiskInfo, RangeLimits, Resize};
use fathom_files::lock::{self, LockError};
use fathom_files::{FileId, gate};
use flushes::{Flushes, OwnFile, Verdict};
pub use marked::refusal_of;
use parking_lot::Mutex;
pub(crate) use place::{At, KIND};
use plan::Planner;
use report::ToldEnd;
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Where written data may be cached, named as in QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Cache {
    /// The host's page cache is bypassed (O_DIRECT); the guest flushes the
    /// device's own write cache.
    #[default]
    None,
    /// Data stays in the host's page cache until the guest flushes. (Live migration between hosts
    /// needs `None`: each host has its own page cache.)
    Writeback,
    /// Reads and writes use the host's page cache, and a write is durable when it completes.
    Writethrough,
}

impl Cache {
    /// All cache modes, the default first.
    pub const ALL: [Cache; 3] = [Cache::None, Cache::Writeback, Cache::Writethrough];

    /// Returns the name of the mode, as in QEMU.
    pub fn name(self) -> &'static str {
        match self {
            Cache::None => "none",
            Cache::Writeback => "writeback",
            Cache::Writethrough => "writethrough",
        }
    }
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Cache {
    type Err = String;

    fn from_str(text: &str) -> Result<Cache, String> {
        let known = |cache: &Cache| cache.name() == text;
        Cache::ALL
            .into_iter()
            .find(known)
            .ok_or_else(|| format!("'{text}' is not none, writeback or writethrough"))
    }
}

/// Action for an image opened for writing whose [mark](superseded) says that a newer image has
/// superseded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnSuperseded {
    /// Opens the image and keeps its mark; the caller decides.
    #[default]
    Ignore,
    /// Refuses to open the image.
    Refuse,
    /// Removes the mark when the image is activated.
    Take,
}

/// Options for opening a file.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Cache mode of the file.
    pub cache: Cache,
    /// Whether the file is opened for reading only.
    pub read_only: bool,
    /// Whether to read an image that others have locked for writing. Needs `read_only`.
    pub force_share: bool,
    /// Whether the image can be opened, but not used, while another process holds it. For servers
    /// to which another process hands the image over. Otherwise opening such an image fails at
    /// once.
    pub patient: bool,
    /// Whether a holder at the time of opening is expected: the predecessor of this process.
    pub succeeds: bool,
    /// Whether the image, once in use, stays locked until it is closed.
    pub keeps_lock: bool,
    /// Action when the image is opened for writing, but a newer image has superseded it.
    pub superseded: OnSuperseded,
    /// Engine of the disk's workers.
    pub engine: EngineKind,
    /// Number of the disk's workers. More can use the disk, but those wait for each other's
    /// flushes.
    pub workers: usize,
    /// Whether the guest may discard.
    pub discard: bool,
    /// Whether the file holds an image of a format such as qcow2: bytes beyond its end read as
    /// zeroes, and a write there makes it longer.
    pub growable: bool,
    /// Smallest block size in bytes to assume for O_DIRECT, a power of two. For tests on hosts
    /// whose devices have smaller blocks.
    pub min_direct_block: Option<u32>,
}

impl Default for FileOptions {
    fn default() -> FileOptions {
        FileOptions {
            cache: Cache::default(),
            read_only: false,
            force_share: false,
            patient: false,
            succeeds: false,
            keeps_lock: false,
            superseded: OnSuperseded::default(),
            engine: EngineKind::default(),
            workers: 1,
            discard: true,
            growable: false,
            min_direct_block: None,
        }
    }
}

impl FileOptions {
    fn lock_use(&self) -> lock::Use {
        lock::Use {
            writes: !self.read_only,
            share: self.force_share,
        }
    }
}

/// Decides whether bytes that a read wants beyond the end of a growable file read as zeroes. If it
/// returns false, the read fails, and the guard has logged the reason.
pub type EndGuard = Arc<dyn Fn(Range<u64>) -> bool + Send + Sync>;

/// Type of the file that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Regular,
    BlockDevice,
}

/// An opened image, shared by its workers.
pub struct FileDisk {
    shared: Arc<Shared>,
}

/// Attributes of the file when it was last taken into use and last left.
#[derive(Default)]
struct Seen {
    taken: Option<Metadata>,
    left: Option<Metadata>,
    /// Number of times others may have changed the file between `left` and `taken`.
    changes: u64,
}

/// Returns whether a file is unchanged. A block device never counts as unchanged: its attributes do
/// not show changes.
fn is_unchanged(left: Option<&Metadata>, taken: Option<&Metadata>) -> bool {
    let state = |seen: &Metadata| {
        let modified = (seen.mtime(), seen.mtime_nsec());
        let changed = (seen.ctime(), seen.ctime_nsec());
        (seen.is_file()).then(|| (seen.ino(), seen.len(), modified, changed))
    };
    let (left, taken) = (left.and_then(state), taken.and_then(state));
    left.is_some() && left == taken
}

/// Interval at which to check whether other workers' flushes have ended.
const LOOK_AT_FLUSHES: Duration = Duration::from_micros(50);

/// State shared by the disk and all its channels.
struct Shared {
    path: PathBuf,
    file: File,
    kind: Kind,
    id: FileId,
    options: FileOptions,
    /// Address alignment in bytes that O_DIRECT demands; 1 without O_DIRECT.
    address_align: u32,
    physical_block_size: u32,
    optimal_io_size: u32,
    /// Whether the file is in a memory file system: small requests are served without the engine.
    in_memory: bool,
    /// The disk's size in bytes.
    size: AtomicU64,
    /// The file's length in bytes, which need not be a multiple of 512.
    file_len: AtomicU64,
    /// Flushes through `file`.
    flushes: Arc<Flushes>,
    /// The file opened again for each worker, if there are several workers.
    own_files: Vec<OwnFile>,
    told_end: ToldEnd,
    seen: Mutex<Seen>,
    planner: Planner,
    ranges: Arc<Ranges>,
    /// Number of requests whose buffers or ranges direct I/O did not accept as they were.
    bounced: AtomicU64,
    /// Whether a write of a whole block has made the file longer than the disk.
    padded: AtomicBool,
    /// Whether the path led to the file when it was opened.
    named: bool,
    /// Whether this disk has marked the file as superseded, for a switch to another image.
    has_marked: AtomicBool,
    /// Checks the end of a growable file. None: the file may end anywhere.
    end_guard: Mutex<Option<EndGuard>>,
}

impl FileDisk {
    /// Opens an image. The error is one line that says what to do.
    pub fn open(path: &Path, options: FileOptions) -> Result<FileDisk, DiskError> {
        let shared = Arc::new(open::open(path, options)?);
        Ok(FileDisk { shared })
    }

    /// Makes a disk of an open file, which must be open for reading and, unless `read_only`, for
    /// writing. `path` is its name in messages.
    pub fn from_file(path: &Path, file: File, options: FileOptions) -> Result<FileDisk, DiskError> {
        let shared = Arc::new(open::examine(path, file, options)?);
        Ok(FileDisk { shared })
    }

    /// Opens the same file again, through the page cache in any mode. For reading and changing an
    /// image's metadata while no request is in flight.
    pub fn reopen(&self) -> Result<File, DiskError> {
        let shared = &*self.shared;
        gate::open_again(&shared.file, !shared.options.read_only)
            .map_err(|error| shared.error("cannot open the file again", error))
    }

    /// Returns the identity of the file, valid while the file is open.
    pub fn id(&self) -> &FileId {
        &self.shared.id
    }

    /// Returns the number of requests that direct I/O did not accept as they were, because they
    /// needed a buffer or changed a block partly.
    pub fn bounced(&self) -> u64 {
        self.shared.bounced.load(Ordering::Relaxed)
    }

    /// Returns the process whose lock on the image conflicts with use here now.
    pub fn holder(&self) -> Option<String> {
        let shared = &*self.shared;
        match lock::check(&shared.path, &shared.file, shared.options.lock_use()) {
            Err(LockError::InUse(holder)) => Some(holder),
            Ok(()) | Err(LockError::Os(_)) => None,
        }
    }

    /// Makes the kernel write the file's cached data now; may block. With the page cache, an error
    /// is reported to the next flush; with [`Cache::None`] it is dropped.
    pub fn flush_early(&self) {
        // `flushes` remembers a failure, except with `Cache::None`.
        let _ = self.shared.flush();
    }

    /// Returns whether writes were lost before a flush made them durable.
    pub fn flush_has_failed(&self) -> bool {
        self.shared.flushes.have_failed()
    }

    /// Returns the file's attributes when this process last activated it.
    pub fn when_taken(&self) -> Option<Metadata> {
        self.shared.seen.lock().taken.clone()
    }

    /// Returns the file's attributes when it was last deactivated, before another process could
    /// lock it.
    pub fn when_left(&self) -> Option<Metadata> {
        self.shared.seen.lock().left.clone()
    }

    /// Returns how often others may have changed the file between deactivation and activation,
    /// including before the first activation.
    pub fn changes_by_others(&self) -> u64 {
        self.shared.seen.lock().changes
    }

    /// Sets the guard that decides where a growable file may end.
    pub fn guard_end(&self, guard: EndGuard) {
        let mut place = self.shared.end_guard.lock();
        *place = Some(guard);
    }
}

impl Disk for FileDisk {
    fn info(&self) -> DiskInfo {
        let shared = &*self.shared;
        let writable = !shared.options.read_only;
        let limits = |max_len| RangeLimits {
            alignment: shared.physical_block_size,
            max_len,
        };
        DiskInfo {
            size: shared.size.load(Ordering::Relaxed),
            block_size: 512,
            physical_block_size: shared.physical_block_size,
            optimal_io_size: shared.optimal_io_size,
            read_only: !writable,
            write_cache: shared.options.cache != Cache::Writethrough,
            discard: (writable && shared.options.discard).then(|| limits(MAX_DISCARD)),
            write_zeroes: writable.then(|| limits(MAX_WRITE_ZEROES)),
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        let shared = &*self.shared;
        let take = match shared.options.patient {
            true => lock::take_over,
            false => lock::take,
        };
        take(&shared.path, &shared.file, shared.options.lock_use())
            .map_err(|error| lock_error(&shared.path, error, !shared.options.read_only))?;
        if let Err(error) = shared.take_mark() {
            lock::release(&shared.path, &shared.file);
            return Err(error);
        }
        shared.look_at_name();
        let taken = shared.file.metadata().ok();
        if let Some(found) = taken.as_ref().filter(|found| found.is_file()) {
            shared.take_in_length(found.len());
        }
        let mut seen = shared.seen.lock();
        seen.changes += u64::from(!is_unchanged(seen.left.as_ref(), taken.as_ref()));
        seen.taken = taken;
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        let shared = &*self.shared;
        let written_back = shared.write_back();
        shared.seen.lock().left = shared.file.metadata().ok();
        if !shared.options.keeps_lock {
            lock::release(&shared.path, &shared.file);
        }
        written_back
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        self.shared.resize(to)
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let channel = FileChannel::new(self.shared.clone(), &mut *cx.engine).map_err(|error| {
            self.shared
                .error("the I/O engine cannot use the file", error)
        })?;
        Ok(Box::new(channel))
    }
}

impl Drop for Shared {
    /// Releases the lock, which would otherwise last until the kernel has destroyed the workers'
    /// rings.
    fn drop(&mut self) {
        if self.options.keeps_lock {
            lock::release(&self.path, &self.file);
        }
    }
}

impl Shared {
    /// Warns if the path no longer leads to the file that is served. The open file is still served:
    /// it alone has the guest's data.
    fn look_at_name(&self) {
        if !self.named || open::is_named(&self.path, &self.file) {
            return;
        }
        let path = self.path.display();
        let what = match self.path.exists() {
            true => "the file was replaced by another file",
            false => "the file was deleted or renamed",
        };
        tracing::warn!(
            "{path}: {what} since it was opened; the open file is still served; restart the \
             server to serve the file that has this name now"
        );
    }

    /// Returns whether bytes that a read has found beyond the end of the file read as zeroes.
    #[cold]
    fn may_miss(&self, missing: Range<u64>) -> bool {
        if self.ends_within_sector(missing.start) {
            return true;
        }
        let guard = self.end_guard.lock().clone();
        self.options.growable && guard.is_none_or(|guard| guard(missing))
    }

    /// Returns whether the file was opened read-only and ends at or before `at`, within the disk's
    /// last sector.
    fn ends_within_sector(&self, at: u64) -> bool {
        let (len, size) = (&self.file_len, &self.size);
        let (len, size) = (len.load(Ordering::Relaxed), size.load(Ordering::Relaxed));
        let is_last_sector = at < size && size - at < 512;
        self.options.read_only && is_last_sector && at >= len
    }

    /// Truncates the file to its length and makes all writes durable.
    fn write_back(&self) -> Result<(), DiskError> {
        if self.options.read_only {
            return Ok(());
        }
        self.trim()
            .map_err(|error| self.error("cannot truncate the file to its size", error))?;
        self.flush()
    }

    /// Makes all completed writes durable; blocks.
    fn flush(&self) -> Result<(), DiskError> {
        self.sync(File::sync_data)
            .map_err(|error| self.error("cannot flush", error))
    }

    /// Calls fsync(2) or fdatasync(2). Fails if writes were lost, even if the kernel reported that
    /// through another open file.
    fn sync(&self, call: fn(&File) -> io::Result<()>) -> io::Result<()> {
        let lost = || Err(io::Error::from_raw_os_error(libc::EIO));
        if self.flushes.have_failed() {
            return lost();
        }
        if !self.is_cached() {
            return call(&self.file);
        }
        let mut flusher = self.flushes.flusher();
        let number = flusher.begin();
        if let Err(error) = call(&self.file) {
            flusher.failed(number);
            return Err(error);
        }
        let mut verdict = flusher.succeeded(number);
        loop {
            match verdict {
                Verdict::Durable => return Ok(()),
                Verdict::Lost => return lost(),
                Verdict::After(before) => {
                    std::thread::sleep(LOOK_AT_FLUSHES);
                    verdict = flusher.verdict(before);
                }
            }
        }
    }

    /// Returns whether writes stay in the host's page cache, whose write-back can fail.
    fn is_cached(&self) -> bool {
        self.options.cache != Cache::None
    }

    /// Updates the file's length if another process has lengthened the file beyond its last block,
    /// so that `trim` does not cut that off. An extension within the last block is padding of a
    /// server that was killed.
    fn take_in_length(&self, len: u64) {
        let before = self.file_len.load(Ordering::Relaxed);
        let block = u64::from(self.physical_block_size);
        if !(before..=before.next_multiple_of(block)).contains(&len) {
            self.file_len.store(len, Ordering::Relaxed);
        }
    }

    /// Truncates the padding that writes of the whole last block have added.
    fn trim(&self) -> io::Result<()> {
        if self.padded.swap(false, Ordering::Relaxed) && self.kind == Kind::Regular {
            self.file.set_len(self.file_len.load(Ordering::Relaxed))?;
        }
        Ok(())
    }

    fn error(&self, what: &'static str, source: io::Error) -> DiskError {
        DiskError::Io {
            path: self.path.clone(),
            what,
            source,
        }
    }
}

fn lock_error(path: &Path, error: LockError, writes: bool) -> DiskError {
    let mut problem = error.to_string();
    if !writes && matches!(error, LockError::InUse(_)) {
        problem += "; --force-share reads it nevertheless";
    }
    DiskError::Unusable {
        path: path.to_owned(),
        problem,
    }
}

/// Maximum length of a discard request in bytes; file systems free extents quickly.
const MAX_DISCARD: u64 = 1 << 30;

/// Maximum length of a write-zeroes request in bytes. If the storage cannot zero ranges itself,
/// zeroes of that length are written.
const MAX_WRITE_ZEROES: u64 = 64 << 20;
