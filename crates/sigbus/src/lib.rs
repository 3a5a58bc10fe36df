//! Mapped files that another process may truncate.
//!
//! Touching a page past the file's end raises SIGBUS, whose default kills the
//! process, with all its disks. The handler looks the address up in a table
//! of guarded mappings. If it is in there, it puts [`Spare`] memory over the
//! rest of that mapping, so that the thread goes on, and tells the mapping's
//! owner. Otherwise the previous handler decides. (I/O by the kernel on such
//! pages fails with EFAULT instead.)
//!
//! The handler makes system calls only, and reads the table without a lock:
//! an entry is stable while memory that it describes is being accessed. What
//! it asks of the kernel cannot be refused: a shared mapping counts neither
//! against a limit of data (RLIMIT_DATA) nor as committed memory
//! (vm.overcommit_memory), whatever its size, and one for the whole rest
//! makes at most one mapping more of a guarded one.

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::{Resource, getrlimit};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};

/// By how many entries the table grows.
const CHUNK: usize = 512;

/// Whom to tell that the file of a mapping was truncated.
pub trait Alarm: Send + Sync {
    /// The rest of a mapping has been replaced by spare memory. Called by a
    /// signal handler on the thread that touched it, and more than once when
    /// several did: it may only do what is async-signal-safe
    /// (signal-safety(7)).
    fn raise(&self);

    /// What to replace it by.
    fn spare(&self) -> &Spare;
}

/// Memory to take the place of what was truncated: zeroes at first, and seen
/// through the mappings of those only who share one `Spare`. It takes no
/// memory but one page until it is used.
pub struct Spare(OwnedFd);

impl Spare {
    pub fn new() -> io::Result<Spare> {
        let file = memfd_create("fathom-spare", MemfdFlags::CLOEXEC)?;
        // This page is there for certain, should the kernel refuse others.
        rustix::io::pwrite(&file, &[0], 0)?;
        Ok(Spare(file))
    }

    /// Be as long as a mapping. One thread at a time.
    fn cover(&self, len: usize) -> io::Result<()> {
        let len = len as u64;
        if fstat(&self.0)?.st_size as u64 >= len {
            return Ok(());
        }
        // To exceed it is not only refused, but a deadly signal.
        if let Some(limit) = getrlimit(Resource::Fsize).current
            && len > limit
        {
            return Err(io::Error::other(format!(
                "its {len} bytes exceed the limit of file sizes, {limit} (RLIMIT_FSIZE)"
            )));
        }
        Ok(ftruncate(&self.0, len)?)
    }
}

impl AsFd for Spare {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What the table points to; thin, unlike the pointer in it.
struct Told {
    alarm: Arc<dyn Alarm>,
    smallest_page: usize,
}

/// One mapping. `version` is odd while the entry changes.
struct Slot {
    version: AtomicU32,
    start: AtomicUsize,
    /// Bytes; 0: free.
    len: AtomicUsize,
    page_size: AtomicUsize,
    /// The first address that was replaced; not part of what `version` is for.
    replaced: AtomicUsize,
    told: AtomicPtr<Told>,
}

impl Slot {
    const fn free() -> Slot {
        Slot {
            version: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page_size: AtomicUsize::new(1),
            replaced: AtomicUsize::new(usize::MAX),
            told: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Only under the lock of `FREE`.
    fn set(&self, start: usize, len: usize, page_size: usize, told: *mut Told) {
        let version = self.version.load(Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page_size.store(page_size, Ordering::Relaxed);
        self.replaced.store(usize::MAX, Ordering::Relaxed);
        self.told.store(told, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }

    /// None if `addr` is not in the mapping.
    fn hit(&'static self, addr: usize) -> Option<Hit> {
        let version = self.version.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        let page_size = self.page_size.load(Ordering::Relaxed);
        let told = self.told.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if version % 2 == 1 || version != self.version.load(Ordering::Relaxed) {
            return None;
        }
        let offset = addr.checked_sub(start).filter(|offset| *offset < len)?;
        let before = offset - offset % page_size;
        Some(Hit {
            slot: self,
            start: start + before,
            before,
            len: len - before,
            told,
        })
    }
}

/// The part of a mapping from the page of an address to its end.
struct Hit {
    slot: &'static Slot,
    start: usize,
    /// Bytes of the mapping before it.
    before: usize,
    len: usize,
    told: *const Told,
}

/// A part of the table; never given back.
struct Chunk {
    slots: [Slot; CHUNK],
    next: Option<&'static Chunk>,
}

/// The last part that was added.
static TABLE: AtomicPtr<Chunk> = AtomicPtr::new(ptr::null_mut());
/// Entries that are free. Its lock is that of all changes of the table.
static FREE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());

/// The parts of the table. Async-signal-safe.
fn chunks() -> impl Iterator<Item = &'static Chunk> {
    // SAFETY: null, or a chunk that was leaked after it was made.
    let last: Option<&'static Chunk> = unsafe { TABLE.load(Ordering::Acquire).as_ref() };
    std::iter::successors(last, |chunk| chunk.next)
}

/// A free entry, of a new part of the table if need be.
fn take_slot(free: &mut Vec<&'static Slot>) -> &'static Slot {
    if let Some(slot) = free.pop() {
        return slot;
    }
    let chunk: &'static mut Chunk = Box::leak(Box::new(Chunk {
        slots: [const { Slot::free() }; CHUNK],
        next: chunks().next(),
    }));
    let pointer: *mut Chunk = chunk;
    TABLE.store(pointer, Ordering::Release);
    // SAFETY: from here on it is only shared.
    let chunk: &'static Chunk = unsafe { &*pointer };
    let [first, rest @ ..] = &chunk.slots;
    free.extend(rest);
    first
}

/// Who had SIGBUS before.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Keeps a mapping in the table. Drop it before unmapping.
pub struct Guarded {
    slot: &'static Slot,
    /// For the table's pointer.
    _told: Arc<Told>,
}

impl Guarded {
    /// Guard `len` bytes from `start`, both multiples of `page_size`, in
    /// which nothing but the mapping of one file lies. Installs the handler
    /// the first time. How many there are is for the callers to bound.
    pub fn new(
        start: *const u8,
        len: usize,
        page_size: usize,
        alarm: Arc<dyn Alarm>,
    ) -> io::Result<Guarded> {
        install()?;
        let mut free = FREE.lock().unwrap_or_else(|e| e.into_inner());
        alarm.spare().cover(len)?;
        let slot = take_slot(&mut free);
        let told = Arc::new(Told {
            alarm,
            smallest_page: rustix::param::page_size(),
        });
        let pointer = Arc::as_ptr(&told).cast_mut();
        slot.set(start.addr(), len, page_size, pointer);
        Ok(Guarded { slot, _told: told })
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(|e| e.into_inner());
        self.slot.set(0, 0, 1, ptr::null_mut());
        free.push(self.slot);
    }
}

/// Install the handler, once in a process.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let install = || {
        // SAFETY: a sigaction of zeroes is valid (SIG_DFL).
        let mut previous: Box<libc::sigaction> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: reads the disposition into memory that is ours.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &mut *previous) } != 0 {
            return Err(last_errno());
        }
        PREVIOUS.store(Box::into_raw(previous), Ordering::Release);
        // SAFETY: as above.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `on_sigbus` has the signature that SA_SIGINFO asks for and
        // is async-signal-safe.
        if unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } != 0 {
            return Err(last_errno());
        }
        Ok(())
    };
    INSTALLED
        .get_or_init(install)
        .map_err(io::Error::from_raw_os_error)
}

fn last_errno() -> i32 {
    io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EINVAL)
}

extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let (addr, code) = unsafe { ((*info).si_addr().addr(), (*info).si_code) };
    // Codes of signals that somebody sent are not positive.
    if code > 0 && absorb(addr) {
        return;
    }
    pass_on(signal, code, info, context);
}

/// Handle a fault in a guarded mapping; false if it is not in one.
fn absorb(addr: usize) -> bool {
    let mut slots = chunks().flat_map(|chunk| &chunk.slots);
    let Some(hit) = slots.find_map(|slot| slot.hit(addr)) else {
        return false;
    };
    // SAFETY: the entry's owner holds it as long as the entry.
    let told = unsafe { &*hit.told };
    let (at, len, offset) = if addr < hit.slot.replaced.load(Ordering::Acquire) {
        (hit.start, hit.len, hit.before)
    } else {
        // The kernel has no page for the replacement: take the one that is
        // there.
        let page = told.smallest_page;
        (addr - addr % page, page, 0)
    };
    // SAFETY: the range is part of a guarded mapping, which holds nothing but
    // that file or what has replaced it, and stays mapped while it is in the
    // table; the faulting access shows that it is in use.
    let replaced = unsafe {
        mmap(
            ptr::with_exposed_provenance_mut(at),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED,
            told.alarm.spare(),
            offset as u64,
        )
    };
    if replaced.is_err() {
        return false;
    }
    // Only now: until then another thread's replacement must be whole, too.
    hit.slot.replaced.fetch_min(at, Ordering::AcqRel);
    told.alarm.raise();
    true
}

/// Not ours: what would have happened without this handler.
fn pass_on(signal: i32, code: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: set before the handler was installed, and never freed.
    let (handler, flags) = unsafe { ((*previous).sa_sigaction, (*previous).sa_flags) };
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: restores the default; a fault then repeats and is fatal.
        unsafe {
            let mut default: libc::sigaction = std::mem::zeroed();
            default.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(signal, &default, ptr::null_mut());
            if code <= 0 {
                libc::raise(signal);
            }
        }
    } else if flags & libc::SA_SIGINFO != 0 {
        type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void);
        // SAFETY: it was installed with SA_SIGINFO.
        unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) };
    } else {
        // SAFETY: it was installed without SA_SIGINFO.
        unsafe { std::mem::transmute::<usize, extern "C" fn(i32)>(handler)(signal) };
    }
}
