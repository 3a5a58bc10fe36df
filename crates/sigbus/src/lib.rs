//! Mapped files that another process may truncate.
//!
//! Touching a page past the file's end raises SIGBUS, whose default kills the
//! process, with all its disks. The handler looks the address up in a table
//! of guarded mappings. If it is in there, it puts zero pages over the rest
//! of that mapping, so that the thread goes on, and tells the mapping's
//! owner. Otherwise the previous handler decides. (I/O by the kernel on such
//! pages fails with EFAULT instead.)
//!
//! The handler makes system calls only, and reads the table without a lock:
//! an entry is stable while memory that it describes is being accessed.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ffi::c_void;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};

/// Mappings at once in this process: 16 front-ends with as many memory slots
/// as they can have.
const SLOTS: usize = 8192;

/// Whom to tell that the file of a mapping was truncated.
pub trait Alarm: Send + Sync {
    /// The rest of a mapping has been replaced by zeroes, private to this
    /// process. Called by a signal handler on the thread that touched it, and
    /// more than once when several did: it may only do what is
    /// async-signal-safe (signal-safety(7)).
    fn raise(&self);
}

/// What the table points to; thin, unlike the pointer in it.
struct Told(Arc<dyn Alarm>);

/// One mapping. `version` is odd while the entry changes.
struct Slot {
    version: AtomicU32,
    start: AtomicUsize,
    /// Bytes; 0: free.
    len: AtomicUsize,
    page_size: AtomicUsize,
    told: AtomicPtr<Told>,
}

impl Slot {
    const fn free() -> Slot {
        Slot {
            version: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page_size: AtomicUsize::new(1),
            told: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Only under the lock of `FREE_SLOTS`.
    fn set(&self, start: usize, len: usize, page_size: usize, told: *mut Told) {
        let version = self.version.load(Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page_size.store(page_size, Ordering::Relaxed);
        self.told.store(told, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }

    /// The part of the mapping from the page of `addr` to its end, and whom
    /// to tell; None if `addr` is not in it.
    fn hit(&self, addr: usize) -> Option<(usize, usize, *const Told)> {
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
        let rest = offset - offset % page_size;
        Some((start + rest, len - rest, told))
    }
}

static TABLE: [Slot; SLOTS] = [const { Slot::free() }; SLOTS];
/// Entries at and after this were never used.
static IN_USE: AtomicUsize = AtomicUsize::new(0);
/// Entries before `IN_USE` that are free again. Its lock is that of all
/// changes of the table.
static FREE_SLOTS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Who had SIGBUS before.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Keeps a mapping in the table. Drop it before unmapping.
pub struct Guarded {
    slot: usize,
    /// For the table's pointer.
    _told: Arc<Told>,
}

impl Guarded {
    /// Guard `len` bytes from `start`, both multiples of `page_size`, in
    /// which nothing but the mapping of one file lies. Installs the handler
    /// the first time.
    pub fn new(
        start: *const u8,
        len: usize,
        page_size: usize,
        alarm: Arc<dyn Alarm>,
    ) -> io::Result<Guarded> {
        install()?;
        let mut free = FREE_SLOTS.lock().unwrap_or_else(|e| e.into_inner());
        let slot = match free.pop() {
            Some(slot) => slot,
            None => {
                let fresh = IN_USE.load(Ordering::Relaxed);
                if fresh == SLOTS {
                    return Err(io::Error::other(format!(
                        "more than {SLOTS} mappings of files of other processes"
                    )));
                }
                IN_USE.store(fresh + 1, Ordering::Release);
                fresh
            }
        };
        let told = Arc::new(Told(alarm));
        let pointer = Arc::as_ptr(&told).cast_mut();
        TABLE[slot].set(start.addr(), len, page_size, pointer);
        Ok(Guarded { slot, _told: told })
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let mut free = FREE_SLOTS.lock().unwrap_or_else(|e| e.into_inner());
        TABLE[self.slot].set(0, 0, 1, ptr::null_mut());
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
    let in_use = IN_USE.load(Ordering::Acquire);
    let Some((start, len, told)) = TABLE[..in_use].iter().find_map(|slot| slot.hit(addr)) else {
        return false;
    };
    // SAFETY: the range is part of a guarded mapping, which holds nothing but
    // that file and stays mapped while it is in the table; the
    // faulting access shows that it is in use.
    let zeroes = unsafe {
        mmap_anonymous(
            ptr::with_exposed_provenance_mut(start),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
        )
    };
    if zeroes.is_err() {
        return false;
    }
    // SAFETY: the entry's owner holds it as long as the entry.
    unsafe { (*told).0.raise() };
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
