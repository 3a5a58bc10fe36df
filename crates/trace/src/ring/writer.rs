//! Creating a trace file, and writing to it without ever waiting.

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

/// A trace file that this process writes. The file stays locked (flock(2))
/// until the last writer is gone, by which readers know whether more may
/// come. If it is truncated meanwhile, the writers go on and their records are
/// lost: see [`RingFile::cut_event`].
pub struct RingFile {
    mapping: Arc<Mapping>,
    header: Header,
    /// Rings whose writer has not been taken.
    free: Vec<bool>,
}

impl RingFile {
    /// Create the trace of `disk` at `path`, with `rings` rings of at least
    /// `capacity` records. An older trace there is replaced; anything else is
    /// left alone, with an error. Its space is allocated here, so that
    /// writing cannot run out of it. Best on tmpfs (/dev/shm, /run), where
    /// nothing is written back.
    pub fn create(
        path: &Path,
        disk: &str,
        rings: usize,
        capacity: usize,
    ) -> Result<RingFile, TraceError> {
        let file = RingFile::prepare(path, disk, rings, capacity)?;
        RingFile::of(path, file)
    }

    /// The same in two steps, which may be two processes': the file, ready for its writers,
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

    /// and the writers, of a file that was prepared.
    pub fn of(path: &Path, file: File) -> Result<RingFile, TraceError> {
        let file = RingFile::resumed(path, file)?;
        file.own();
        Ok(file)
    }

    /// One that somebody else has written, and might go on with until [`RingFile::own`]; writers are
    /// taken when he stands still. It comes with its lock.
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

    /// It is this process's from now on.
    pub fn own(&self) {
        let mut both = [0; 8];
        both[..4].copy_from_slice(&std::process::id().to_ne_bytes());
        both[AT_CLOCK - AT_PID..].copy_from_slice(&u32::from(self.header.tsc).to_ne_bytes());
        let word = u64::from_ne_bytes(both);
        self.mapping.words()[AT_PID / 8].store(word, Ordering::Relaxed);
        // An older version has begun it, and what is written now it could not read.
        let mut both = [0; 8];
        both[..4].copy_from_slice(&VERSION.to_ne_bytes());
        both[AT_RECORD - AT_VERSION..].copy_from_slice(&(RECORD as u32).to_ne_bytes());
        let word = u64::from_ne_bytes(both);
        self.mapping.words()[AT_VERSION / 8].store(word, Ordering::Relaxed);
    }

    /// With its lock.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.mapping.file.as_fd()
    }

    /// One for each worker.
    pub fn rings(&self) -> usize {
        self.free.len()
    }

    /// The one writer of ring `ring`, which goes on behind what is there.
    ///
    /// # Panics
    /// When there is no such ring or its writer has been taken.
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

    /// How many records have been written to the ring whose first word is there. A stranger may have
    /// changed them: then it is any number.
    fn written(&self, first: usize) -> u64 {
        let sequence =
            |slot: usize| self.mapping.words()[first + slot * WORDS].load(Ordering::Acquire);
        let capacity = self.header.capacity as usize;
        // The last round ends before the first slot that is of the round before.
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

    /// Readable once a writer has found that another process truncated the
    /// file. Nothing is left to do then but to drop it and its writers.
    pub fn cut_event(&self) -> BorrowedFd<'_> {
        self.mapping.cut.event.as_fd()
    }

    /// Write the clock's frequency into the file again: it is known better
    /// the longer the process runs.
    pub fn calibrate(&self) {
        let hz = Clock::get().hz();
        self.mapping.words()[AT_HZ / 8].store(hz.to_bits(), Ordering::Relaxed);
    }
}

/// The one writer of one ring; goes to its worker.
pub struct RingWriter {
    mapping: Arc<Mapping>,
    /// Index of the ring's first word in the file.
    first: usize,
    mask: u64,
    /// How many records have been written.
    next: u64,
}

impl RingWriter {
    /// Append a record, overwriting the oldest. No system call, no lock, no
    /// allocation.
    #[inline]
    pub fn write(&mut self, record: &TraceRecord) {
        let payload = encode(record);
        let at = self.first + (self.next & self.mask) as usize * WORDS;
        let [sequence, words @ ..] = &self.mapping.words()[at..at + WORDS] else {
            unreachable!("a record has words");
        };
        sequence.store(2 * self.next + 1, Ordering::Relaxed);
        // Whoever sees a word of this record sees that it is being written.
        fence(Ordering::Release);
        for (word, value) in words.iter().zip(payload) {
            word.store(value, Ordering::Relaxed);
        }
        sequence.store(2 * self.next + 2, Ordering::Release);
        self.next += 1;
    }
}

/// For when the file is found truncated.
struct Cut {
    /// Readable from then on: an eventfd.
    event: OwnedFd,
    spare: Spare,
}

impl Alarm for Cut {
    fn raise(&self) {
        // Its counter cannot overflow by ones.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    fn spare(&self) -> &Spare {
        &self.spare
    }
}

/// A whole trace file in memory.
struct Mapping {
    /// Before the memory goes.
    guard: Option<Guarded>,
    cut: Arc<Cut>,
    start: NonNull<AtomicU64>,
    words: usize,
    /// Holds the lock.
    file: File,
}

// SAFETY: the memory is reached by atomic operations only, and is unmapped
// when the last owner drops it, on whatever thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Map all of `file`, which is `bytes` long, with its pages present.
    fn new(file: File, bytes: usize) -> io::Result<Mapping> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let cut = Arc::new(Cut {
            event: eventfd(0, flags)?,
            spare: Spare::new()?,
        });
        // SAFETY: a new mapping at an address of the kernel's choice, of a
        // file that is at least as long; nothing else refers to it.
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
        // Pages are not huge: hugetlbfs has no pwrite(2).
        let page_size = page_size();
        let whole_pages = bytes.next_multiple_of(page_size);
        let guarded = Guarded::new(start.cast(), whole_pages, page_size, cut)?;
        mapping.guard = Some(guarded);
        // Only the first writes are slower where the kernel (before 5.14)
        // cannot do this.
        // SAFETY: this is the mapping made above; its contents stay.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxPopulateWrite) };
        Ok(mapping)
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this many words, is page aligned and lives
        // as long as self; other processes may change them, as atomics may.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: made by mmap with this length; all borrows of it are over.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.words * 8) };
    }
}

/// Make the file under a name of its own and then give it its own: a reader
/// of an older trace keeps what it has, and nobody sees half a header.
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
    // What is there under this name is from a process that died under way.
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

/// Allocate by writing: a hole in the mapping would be a SIGBUS when the
/// file system is full.
fn write_zeroes(file: &mut File, bytes: u64) -> io::Result<()> {
    io::copy(&mut io::repeat(0).take(bytes), file)?;
    file.flush()
}

/// Anything but a trace (and an empty file, as mktemp(1) makes) is somebody's
/// data: a disk image named by mistake, say, or /dev/null.
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
