//! Creates trace files, and writes to them without waiting.

use super::header::{
    AT_CLOCK, AT_HZ, AT_PID, AT_RECORD, AT_VERSION, HEADER, Header, VERSION, has_magic,
};
use super::{MAX_NUMBER, RECORD, TraceError, TraceRecord, WORDS, encode};
use crate::clock::Clock;
use fathom_sigbus::{Alarm, Guarded, Spare};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::param::page_size;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A trace file that this process writes.
///
/// The file stays locked (flock(2)) until its last writer is dropped, so that readers know whether
/// more records may follow. If another process truncates the file, writers continue and their
/// records are lost: see [`RingFile::cut_event`].
pub struct RingFile {
    mapping: Arc<Mapping>,
    header: Header,
    /// Whether each ring's writer is still available.
    free: Vec<bool>,
}

impl RingFile {
    /// Creates the trace of `disk` at `path`, with `rings` rings of at least `capacity` records.
    ///
    /// Replaces an older trace at `path`, and fails if another file exists there. Allocates the
    /// space in advance, so that writers cannot run out of it. The file should be on tmpfs
    /// (/dev/shm, /run), where nothing is written back.
    pub fn create(
        path: &Path,
        disk: &str,
        rings: usize,
        capacity: usize,
    ) -> Result<RingFile, TraceError> {
        let file = RingFile::prepare(path, disk, rings, capacity)?;
        RingFile::of(path, file)
    }

    /// First step of [`RingFile::create`], possibly in another process: creates the file for
    /// [`RingFile::of`].
    pub fn prepare(
        path: &Path,
        disk: &str,
        rings: usize,
        capacity: usize,
    ) -> Result<File, TraceError> {
        let unusable = TraceError::unusable(path);
        refuse_to_overwrite(path)?;
        let rings = u32::try_from(rings).unwrap_or(u32::MAX);
        let capacity = capacity.clamp(super::header::MIN_CAPACITY as usize, usize::MAX / 2 + 1);
        let capacity = u32::try_from(capacity.next_power_of_two()).unwrap_or(u32::MAX);
        let header = Header::new(disk, rings, capacity, Clock::get());
        header.check().map_err(unusable)?;
        create_file(path, &header).map_err(TraceError::io(path))
    }

    /// Second step of [`RingFile::create`]: takes over a file that [`RingFile::prepare`] created.
    pub fn of(path: &Path, file: File) -> Result<RingFile, TraceError> {
        let file = RingFile::resumed(path, file)?;
        file.own();
        Ok(file)
    }

    /// Opens a trace of another process, which may continue to write until [`RingFile::own`]. The
    /// open file brings its lock.
    ///
    /// Take writers only when the other process has stopped writing.
    pub fn resumed(path: &Path, file: File) -> Result<RingFile, TraceError> {
        let mut page = [0; HEADER];
        file.read_exact_at(&mut page, 0)
            .map_err(TraceError::io(path))?;
        let header = Header::decode(&page).map_err(TraceError::unusable(path))?;
        if header.tsc != Clock::get().is_tsc() {
            let problem = "its timestamps come from a clock that is no longer in use";
            return Err(TraceError::unusable(path)(problem.into()));
        }
        let mapping = Mapping::new(file, header.file_bytes() as usize);
        Ok(RingFile {
            mapping: Arc::new(mapping.map_err(TraceError::io(path))?),
            free: vec![true; header.rings as usize],
            header,
        })
    }

    /// Makes this process the trace's writer in the header.
    pub fn own(&self) {
        let mut both = [0; 8];
        both[..4].copy_from_slice(&std::process::id().to_ne_bytes());
        both[AT_CLOCK - AT_PID..].copy_from_slice(&u32::from(self.header.tsc).to_ne_bytes());
        let word = u64::from_ne_bytes(both);
        self.mapping.words()[AT_PID / 8].store(word, Ordering::Relaxed);
        // If an older version began the trace, that version could not read the records written from
        // now on.
        let mut both = [0; 8];
        both[..4].copy_from_slice(&VERSION.to_ne_bytes());
        both[AT_RECORD - AT_VERSION..].copy_from_slice(&(RECORD as u32).to_ne_bytes());
        let word = u64::from_ne_bytes(both);
        self.mapping.words()[AT_VERSION / 8].store(word, Ordering::Relaxed);
    }

    /// Returns the open file, which holds the lock.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.mapping.file.as_fd()
    }

    /// Returns the number of rings, one for each worker.
    pub fn rings(&self) -> usize {
        self.free.len()
    }

    /// Returns the only writer of ring `ring`, which appends to the existing records.
    ///
    /// # Panics
    /// Panics if there is no such ring, or if its writer has been taken.
    pub fn writer(&mut self, ring: usize) -> RingWriter {
        let free = std::mem::take(&mut self.free[ring]);
        assert!(free, "ring {ring} has its writer");
        let first = (HEADER as u64 + ring as u64 * self.header.ring_bytes()) / 8;
        let first = first as usize;
        RingWriter {
            mapping: self.mapping.clone(),
            first,
            mask: u64::from(self.header.capacity) - 1,
            next: self.written(first),
        }
    }

    /// Returns the number of records written to the ring whose first word has this index.
    ///
    /// If another process has changed the ring, the number is arbitrary.
    fn written(&self, first: usize) -> u64 {
        let sequence =
            |slot: usize| self.mapping.words()[first + slot * WORDS].load(Ordering::Acquire);
        let capacity = self.header.capacity as usize;
        // The last round ends before the first slot of the previous round.
        let round = sequence(0);
        if round % 2 == 1 || !(2..=2 * MAX_NUMBER).contains(&round) {
            return 0;
        }
        let (mut of_it, mut others) = (0, capacity);
        while others - of_it > 1 {
            let slot = of_it + (others - of_it) / 2;
            match sequence(slot) == round + 2 * slot as u64 {
                true => of_it = slot,
                false => others = slot,
            }
        }
        (round - 2) / 2 + others as u64
    }

    /// Returns an eventfd that is readable once a writer has found the file truncated by another
    /// process.
    ///
    /// The caller can then only drop this file and its writers.
    pub fn cut_event(&self) -> BorrowedFd<'_> {
        self.mapping.cut.event.as_fd()
    }

    /// Writes the clock's frequency to the file again, because it becomes more exact the longer the
    /// process runs.
    pub fn calibrate(&self) {
        let hz = Clock::get().hz();
        self.mapping.words()[AT_HZ / 8].store(hz.to_bits(), Ordering::Relaxed);
    }
}

/// The only writer of one ring, used by its worker.
pub struct RingWriter {
    mapping: Arc<Mapping>,
    /// Index of the ring's first word in the file.
    first: usize,
    mask: u64,
    /// Number of records that have been written.
    next: u64,
}

impl RingWriter {
    /// Appends a record, and overwrites the oldest. Makes no system call, takes no lock and
    /// allocates nothing.
    #[inline]
    pub fn write(&mut self, record: &TraceRecord) {
        let payload = encode(record);
        let at = self.first + (self.next & self.mask) as usize * WORDS;
        let [sequence, words @ ..] = &self.mapping.words()[at..at + WORDS] else {
            unreachable!("a record has words");
        };
        sequence.store(2 * self.next + 1, Ordering::Relaxed);
        // A reader that sees a word of this record then also sees the odd sequence word.
        fence(Ordering::Release);
        for (word, value) in words.iter().zip(payload) {
            word.store(value, Ordering::Relaxed);
        }
        sequence.store(2 * self.next + 2, Ordering::Release);
        self.next += 1;
    }
}

/// Handles truncation of the file.
struct Cut {
    /// An eventfd that is readable once truncation was found.
    event: OwnedFd,
    spare: Spare,
}

impl Alarm for Cut {
    fn raise(&self) {
        // The counter cannot overflow by increments of one.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    fn spare(&self) -> &Spare {
        &self.spare
    }
}

/// A whole trace file mapped to memory.
struct Mapping {
    /// Must be dropped before the memory is unmapped.
    guard: Option<Guarded>,
    cut: Arc<Cut>,
    start: NonNull<AtomicU64>,
    words: usize,
    /// The open file, which holds the lock.
    file: File,
}

// SAFETY: the memory is accessed only by atomic operations. The last owner unmaps it when it is
// dropped, on any thread.
unsafe impl Send for Mapping {}
// SAFETY: see `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all of `file`, which has `bytes` bytes, with its pages present.
    fn new(file: File, bytes: usize) -> io::Result<Mapping> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let cut = Arc::new(Cut {
            event: eventfd(0, flags)?,
            spare: Spare::new()?,
        });
        // SAFETY: creates a new mapping at an address of the kernel's choice, of a file that is
        // long enough. No other code refers to the mapping.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        let mut mapping = Mapping {
            guard: None,
            cut: cut.clone(),
            start: NonNull::new(start.cast()).ok_or(ErrorKind::OutOfMemory)?,
            words: bytes / 8,
            file,
        };
        start.expose_provenance();
        // Pages cannot be huge, because hugetlbfs does not support pwrite(2).
        let page_size = page_size();
        let whole_pages = bytes.next_multiple_of(page_size);
        let guarded = Guarded::new(start.cast(), whole_pages, page_size, cut)?;
        mapping.guard = Some(guarded);
        // Before Linux 5.14 this fails, and only the first writes are slower.
        // SAFETY: the mapping was made above, and its content does not change.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxPopulateWrite) };
        Ok(mapping)
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this many words, is page aligned and exists until self is
        // dropped. Other processes may change the words, as atomics allow.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: mmap made the mapping with this length, and all borrows of it have ended.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.words * 8) };
    }
}

/// Creates the file under a temporary name and then renames it.
///
/// A reader of an older trace keeps that trace, and no reader sees an incomplete header.
fn create_file(path: &Path, header: &Header) -> io::Result<File> {
    let temporary = temporary_name(path);
    let made = fill(&temporary, header).and_then(|file| {
        std::fs::rename(&temporary, path)?;
        Ok(file)
    });
    if made.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    made
}

fn temporary_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    name.into()
}

fn fill(path: &Path, header: &Header) -> io::Result<File> {
    // A file of this name is left from a process that died before the rename.
    let _ = std::fs::remove_file(path);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.lock()?;
    let bytes = header.file_bytes();
    file.set_len(bytes)?;
    match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => {}
        Err(rustix::io::Errno::OPNOTSUPP) => write_zeroes(&mut file, bytes)?,
        Err(error) => return Err(error.into()),
    }
    let page = header.encode();
    rustix::io::pwrite(&file, &page, 0)?;
    Ok(file)
}

/// Allocates space by writing zeroes, because a hole in the mapping would raise SIGBUS when the
/// file system is full.
fn write_zeroes(file: &mut File, bytes: u64) -> io::Result<()> {
    io::copy(&mut io::repeat(0).take(bytes), file)?;
    file.flush()
}

/// Fails if the existing file is neither a trace nor empty, as mktemp(1) makes it.
///
/// Another file may hold data, for example a disk image named by mistake, or be /dev/null.
fn refuse_to_overwrite(path: &Path) -> Result<(), TraceError> {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(TraceError::io(path)(e)),
    };
    let mut start = Vec::new();
    if metadata.is_file() {
        let file = File::open(path).map_err(TraceError::io(path))?;
        file.take(RECORD as u64)
            .read_to_end(&mut start)
            .map_err(TraceError::io(path))?;
        if start.is_empty() || has_magic(&start) {
            return Ok(());
        }
    }
    let problem = "exists and is not a trace; choose another name";
    Err(TraceError::unusable(path)(problem.into()))
}
