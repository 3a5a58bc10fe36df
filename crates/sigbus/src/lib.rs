//! Keeps the process alive when another process truncates a file that this process has mapped.
//!
//! An access to a page beyond the file's end raises SIGBUS, which by default kills the process with
//! all its disks. The signal handler looks the address up in a table of guarded mappings.
//!
//! If a guarded mapping contains the address, the handler replaces the rest of that mapping with
//! [`Spare`] memory, so that the thread continues. The handler then notifies the mapping's owner.
//! If no guarded mapping contains the address, the previous handler decides. I/O by the kernel on
//! such pages does not raise SIGBUS, but fails with EFAULT.
//!
//! The handler makes only system calls, and reads the table without a lock: an entry does not
//! change while memory that it describes is being accessed. The kernel cannot refuse the
//! replacement because of limits. A shared mapping of any size counts neither against RLIMIT_DATA
//! nor as committed memory (vm.overcommit_memory). A single replacement for the whole rest adds at
//! most one mapping per guarded mapping.

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::{Resource, getrlimit};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

/// Number of entries by which the table grows.
const CHUNK: usize = 512;

/// The owner of a mapping, which is notified when the mapping's file was truncated.
pub trait Alarm: Send + Sync {
    /// Notifies the owner that spare memory has replaced the rest of a mapping.
    ///
    /// The signal handler calls this on the thread that accessed the mapping, and may call it more
    /// than once if several threads did. An implementation must be async-signal-safe
    /// (signal-safety(7)).
    fn raise(&self);

    /// Returns the memory that replaces truncated memory.
    fn spare(&self) -> &Spare;
}

/// Memory that replaces truncated memory.
///
/// The memory is initially zero. Only mappings that share one `Spare` see its content. The memory
/// occupies one page until it is used.
pub struct Spare(OwnedFd);

impl Spare {
    /// Creates spare memory.
    ///
    /// # Errors
    /// If no file in memory, or no page for it, can be allocated.
    pub fn new() -> io::Result<Spare> {
        let file = memfd_create("fathom-spare", MemfdFlags::CLOEXEC)?;
        // Allocates one page in advance, in case the kernel has no memory for more later.
        rustix::io::pwrite(&file, &[0], 0)?;
        Ok(Spare(file))
    }

    /// Extends the memory to the length of a mapping. Only one thread at a time may call this.
    fn cover(&self, len: usize) -> io::Result<()> {
        let len = len as u64;
        if fstat(&self.0)?.st_size as u64 >= len {
            return Ok(());
        }
        // Exceeding this limit would also raise SIGXFSZ, which kills the process.
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

/// Data that the table's pointers refer to. The pointers are thin, unlike the pointer to `alarm`.
struct Told {
    alarm: Arc<dyn Alarm>,
    smallest_page: usize,
}

/// Table entry of one mapping. `version` is odd while the entry changes.
struct Slot {
    version: AtomicU32,
    start: AtomicUsize,
    /// Length of the mapping in bytes; 0 if the entry is free.
    len: AtomicUsize,
    page_size: AtomicUsize,
    /// The lowest address that was replaced. `version` does not protect this field.
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

    /// Changes the entry. The caller must hold the lock of `FREE`.
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

    /// Returns the part of the mapping to replace, or `None` if `addr` is not in the mapping.
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

/// The part of a mapping from the page of an address to the end.
struct Hit {
    slot: &'static Slot,
    start: usize,
    /// Bytes of the mapping before this part.
    before: usize,
    len: usize,
    told: *const Told,
}

/// A part of the table, which is never freed.
struct Chunk {
    slots: [Slot; CHUNK],
    next: Option<&'static Chunk>,
}

/// The part that was added last.
static TABLE: AtomicPtr<Chunk> = AtomicPtr::new(ptr::null_mut());
/// Free entries. Every change of the table holds this lock.
static FREE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());

/// Iterates over the parts of the table. Async-signal-safe.
fn chunks() -> impl Iterator<Item = &'static Chunk> {
    // SAFETY: the pointer is null, or refers to a chunk that was leaked after its initialization.
    let last: Option<&'static Chunk> = unsafe { TABLE.load(Ordering::Acquire).as_ref() };
    std::iter::successors(last, |chunk| chunk.next)
}

/// Takes a free entry, and extends the table if no entry is free.
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
    // SAFETY: from here on the chunk is only shared.
    let chunk: &'static Chunk = unsafe { &*pointer };
    let [first, rest @ ..] = &chunk.slots;
    free.extend(rest);
    first
}

/// The action for SIGBUS before this handler was installed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Keeps a mapping in the table. Drop this value before the memory is unmapped.
pub struct Guarded {
    slot: &'static Slot,
    /// Keeps the target of the table's pointer alive.
    _told: Arc<Told>,
}

impl Guarded {
    /// Guards `len` bytes from `start`, both multiples of `page_size`. The range must contain
    /// nothing but the mapping of one file.
    ///
    /// The first call installs the handler. Callers must limit the number of guarded mappings.
    pub fn new(
        start: *const u8,
        len: usize,
        page_size: usize,
        alarm: Arc<dyn Alarm>,
    ) -> io::Result<Guarded> {
        install()?;
        let mut free = FREE.lock();
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
        let mut free = FREE.lock();
        self.slot.set(0, 0, 1, ptr::null_mut());
        free.push(self.slot);
    }
}

/// Installs the handler, once per process.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let install = || {
        // SAFETY: a sigaction of zeroes is valid (SIG_DFL).
        let mut previous: Box<libc::sigaction> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: the call writes the current action to a valid sigaction.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &mut *previous) } != 0 {
            return Err(last_errno());
        }
        PREVIOUS.store(Box::into_raw(previous), Ordering::Release);
        // SAFETY: a sigaction of zeroes is valid.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `on_sigbus` has the signature that SA_SIGINFO requires, and is async-signal-safe.
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
    // Signals that a process has sent have codes of 0 or less.
    if code > 0 && absorb(addr) {
        return;
    }
    pass_on(signal, code, info, context);
}

/// Handles a fault in a guarded mapping. Returns false if the address is in none.
fn absorb(addr: usize) -> bool {
    let mut slots = chunks().flat_map(|chunk| &chunk.slots);
    let Some(hit) = slots.find_map(|slot| slot.hit(addr)) else {
        return false;
    };
    // SAFETY: the entry's owner keeps this data alive until it has cleared the entry, which does
    // not happen while the memory is being accessed (see the module's documentation).
    let told = unsafe { &*hit.told };
    let (at, len, offset) = if addr < hit.slot.replaced.load(Ordering::Acquire) {
        (hit.start, hit.len, hit.before)
    } else {
        // The kernel has no page for the replacement, so the page from `Spare::new` is mapped here.
        let page = told.smallest_page;
        (addr - addr % page, page, 0)
    };
    // SAFETY: the range is part of a guarded mapping, which contains only the file or its
    // replacement. The range stays mapped while it is in the table, and the faulting access shows
    // that it is in use.
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
    // Only after the mapping: until then another thread must also replace the whole rest.
    hit.slot.replaced.fetch_min(at, Ordering::AcqRel);
    told.alarm.raise();
    true
}

/// Handles a signal that no guarded mapping explains, with the previous action.
///
/// If SIGBUS was ignored before, the default action applies.
fn pass_on(signal: i32, code: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: this was set before the handler was installed, and is never freed.
    let (handler, flags) = unsafe { ((*previous).sa_sigaction, (*previous).sa_flags) };
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: restores the default action. A fault then repeats and kills the process.
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
        // SAFETY: the previous handler was installed with SA_SIGINFO.
        unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) };
    } else {
        // SAFETY: the previous handler was installed without SA_SIGINFO.
        unsafe { std::mem::transmute::<usize, extern "C" fn(i32)>(handler)(signal) };
    }
}
