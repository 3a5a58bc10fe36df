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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Where written data may rest, by the names that QEMU users know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Cache {
    /// The host's page cache is bypassed (O_DIRECT); the guest flushes the
    /// device's own write cache.
    #[default]
    None,
    /// In the host's page cache until the guest flushes.
    /// (Live migration between hosts needs `None`: each has its own.)
    Writeback,
    /// Nowhere: a write is durable when it completes.
    Writethrough,
}

impl Cache {
    pub const ALL: [Cache; 3] = [Cache::None, Cache::Writeback, Cache::Writethrough];

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

/// What becomes of an image to be written whose [mark](superseded) says that a newer image has superseded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnSuperseded {
    /// The image is opened, and keeps its mark: whoever opens it decides.
    #[default]
    Ignore,
    /// The image is not opened.
    Refuse,
    /// The mark is removed when the image is taken into use.
    Take,
}

/// How to open a file.
#[derive(Clone, Debug)]
pub struct FileOptions {
    pub cache: Cache,
    pub read_only: bool,
    /// Read an image that others have locked for writing. Needs `read_only`.
    pub force_share: bool,
    /// While another process has the image, it can be opened, but not used:
    /// for servers, to which others hand it over. Who is not patient is
    /// refused at once.
    pub patient: bool,
    /// That somebody has it when it is opened is no news: it is whom it comes from.
    pub succeeds: bool,
    /// Once it is in use it stays locked until it is closed.
    pub keeps_lock: bool,
    /// What becomes of an image to be written that a newer one has superseded.
    pub superseded: OnSuperseded,
    /// The engine that the disk's workers will use.
    pub engine: EngineKind,
    /// How many they are. More can use it, but those wait for each other's flushes.
    pub workers: usize,
    /// Whether the guest may discard.
    pub discard: bool,
    /// The file holds an image of a format of its own: what lies beyond its
    /// end reads as zeroes, and a write there makes it longer.
    pub growable: bool,
    /// Treat the file as if O_DIRECT needed this alignment; for tests on
    /// hosts whose devices have smaller blocks. A power of two.
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

/// Asked about bytes of a growable file that a read wants and that lie behind the file's end: whether they read as
/// zeroes. False: the read fails, and the guard has logged why.
pub type EndGuard = Arc<dyn Fn(Range<u64>) -> bool + Send + Sync>;

/// What kind of thing is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Regular,
    BlockDevice,
}

/// An opened image, shared by its workers.
pub struct FileDisk {
    shared: Arc<Shared>,
}

/// The file as it was at the ends of its use.
#[derive(Default)]
struct Seen {
    taken: Option<Metadata>,
    left: Option<Metadata>,
    /// So often others may have changed it between the two.
    changes: u64,
}

/// A file tells whether it was changed; a device does not.
fn is_unchanged(left: Option<&Metadata>, taken: Option<&Metadata>) -> bool {
    let state = |seen: &Metadata| {
        let modified = (seen.mtime(), seen.mtime_nsec());
        let changed = (seen.ctime(), seen.ctime_nsec());
        (seen.is_file()).then(|| (seen.ino(), seen.len(), modified, changed))
    };
    let (left, taken) = (left.and_then(state), taken.and_then(state));
    left.is_some() && left == taken
}

/// Time between two looks at flushes of other workers.
const LOOK_AT_FLUSHES: Duration = Duration::from_micros(50);

/// What the disk and all its channels know.
struct Shared {
    path: PathBuf,
    file: File,
    kind: Kind,
    id: FileId,
    options: FileOptions,
    /// What O_DIRECT demands of addresses: 1 where it is not used.
    address_align: u32,
    physical_block_size: u32,
    optimal_io_size: u32,
    /// Data lives in memory: small requests are served without the engine.
    in_memory: bool,
    /// The disk's size.
    size: AtomicU64,
    /// The file's, which need not be a multiple of 512.
    file_len: AtomicU64,
    /// By `file`.
    flushes: Arc<Flushes>,
    /// For workers, if there are several.
    own_files: Vec<OwnFile>,
    told_end: ToldEnd,
    seen: Mutex<Seen>,
    planner: Planner,
    ranges: Arc<Ranges>,
    /// Requests whose buffers or ranges direct I/O did not take as they were.
    bounced: AtomicU64,
    /// A write of a whole block has made the file longer than the disk.
    padded: AtomicBool,
    /// The path led to the file when it was opened.
    named: bool,
    /// The file's mark was made by this disk, for a switch to another image.
    has_marked: AtomicBool,
    /// None: a growable file may end anywhere.
    end_guard: Mutex<Option<EndGuard>>,
}

impl FileDisk {
    /// Open an image. The error is one line that says what to do.
    pub fn open(path: &Path, options: FileOptions) -> Result<FileDisk, DiskError> {
        let shared = Arc::new(open::open(path, options)?);
        Ok(FileDisk { shared })
    }

    /// Use a file that is open, for reading and, unless `read_only`, writing.
    /// `path` is its name in messages.
    pub fn from_file(path: &Path, file: File, options: FileOptions) -> Result<FileDisk, DiskError> {
        let shared = Arc::new(open::examine(path, file, options)?);
        Ok(FileDisk { shared })
    }

    /// The same file once more, by the page cache in any mode: for reading and
    /// changing an image's metadata while no request is in flight.
    pub fn reopen(&self) -> Result<File, DiskError> {
        let shared = &*self.shared;
        gate::open_again(&shared.file, !shared.options.read_only)
            .map_err(|error| shared.error("cannot open the file again", error))
    }

    /// Identity of the file, for as long as it is open.
    pub fn id(&self) -> &FileId {
        &self.shared.id
    }

    /// How many requests direct I/O did not take as they were: through a
    /// buffer, or for a part of a block.
    pub fn bounced(&self) -> u64 {
        self.shared.bounced.load(Ordering::Relaxed)
    }

    /// Who has the image locked in a way that it cannot be used here now.
    pub fn holder(&self) -> Option<String> {
        let shared = &*self.shared;
        match lock::check(&shared.path, &shared.file, shared.options.lock_use()) {
            Err(LockError::InUse(holder)) => Some(holder),
            Ok(()) | Err(LockError::Os(_)) => None,
        }
    }

    /// Has the kernel write what it has of the file by now; may block. What fails is told to those
    /// whose flush comes next.
    pub fn flush_early(&self) {
        // It is remembered.
        let _ = self.shared.flush();
    }

    /// Whether writes were lost that a flush has not made durable.
    pub fn flush_has_failed(&self) -> bool {
        self.shared.flushes.have_failed()
    }

    /// How the file was when it became this process's, after whoever had it before.
    pub fn when_taken(&self) -> Option<Metadata> {
        self.shared.seen().taken.clone()
    }

    /// How it was left, before anybody else could have it.
    pub fn when_left(&self) -> Option<Metadata> {
        self.shared.seen().left.clone()
    }

    /// How often others may have changed it between its being left here and taken again, the first time included.
    pub fn changes_by_others(&self) -> u64 {
        self.shared.seen().changes
    }

    /// Who knows, from now on, where a growable file may end.
    pub fn guard_end(&self, guard: EndGuard) {
        let mut place = self.shared.end_guard();
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
        let mut seen = shared.seen();
        seen.changes += u64::from(!is_unchanged(seen.left.as_ref(), taken.as_ref()));
        seen.taken = taken;
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        let shared = &*self.shared;
        let written_back = shared.write_back();
        shared.seen().left = shared.file.metadata().ok();
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
    /// A lock would else last until the kernel has done away with the workers' rings.
    fn drop(&mut self) {
        if self.options.keeps_lock {
            lock::release(&self.path, &self.file);
        }
    }
}

impl Shared {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_guard(&self) -> MutexGuard<'_, Option<EndGuard>> {
        let guard = self.end_guard.lock();
        guard.unwrap_or_else(PoisonError::into_inner)
    }

    /// Says if the file that is served is not the one that is found by its name
    /// any more. It is served on: nobody else has the guest's data.
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

    /// Whether these bytes, which a read has found missing, read as zeroes.
    #[cold]
    fn may_miss(&self, missing: Range<u64>) -> bool {
        if self.ends_within_sector(missing.start) {
            return true;
        }
        let guard = self.end_guard().clone();
        self.options.growable && guard.is_none_or(|guard| guard(missing))
    }

    /// Whether the file was opened for reading with an end at `at`, within the disk's last sector.
    fn ends_within_sector(&self, at: u64) -> bool {
        let (len, size) = (&self.file_len, &self.size);
        let (len, size) = (len.load(Ordering::Relaxed), size.load(Ordering::Relaxed));
        let is_last_sector = at < size && size - at < 512;
        self.options.read_only && is_last_sector && at >= len
    }

    /// Everything written is durable, and the file as long as it was.
    fn write_back(&self) -> Result<(), DiskError> {
        if self.options.read_only {
            return Ok(());
        }
        self.trim()
            .map_err(|error| self.error("cannot truncate the file to its size", error))?;
        self.flush()
    }

    /// Makes durable what has been written; blocks.
    fn flush(&self) -> Result<(), DiskError> {
        self.sync(File::sync_data)
            .map_err(|error| self.error("cannot flush", error))
    }

    /// Calls fsync(2) or fdatasync(2). Fails if writes were lost, whomever the kernel has told so.
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

    /// Whether writes rest in the host's page cache, which the kernel can lose.
    fn is_cached(&self) -> bool {
        self.options.cache != Cache::None
    }

    /// Others may have added something, which is not to be cut off. (What a server that was killed has added to the last
    /// block is.)
    fn take_in_length(&self, len: u64) {
        let before = self.file_len.load(Ordering::Relaxed);
        let block = u64::from(self.physical_block_size);
        if !(before..=before.next_multiple_of(block)).contains(&len) {
            self.file_len.store(len, Ordering::Relaxed);
        }
    }

    /// Take back what writing the last block has added.
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

/// The longest discard in one request: a file system frees extents quickly.
const MAX_DISCARD: u64 = 1 << 30;

/// The longest write zeroes in one request: where the storage cannot do it by
/// itself, this much is written.
const MAX_WRITE_ZEROES: u64 = 64 << 20;
