//! Signals a peer's eventfds without ever waiting for the peer.
//!
//! A write to an eventfd whose counter is full sleeps until a thread or process reads the eventfd,
//! unless O_NONBLOCK is set. The peer shares that flag, may rely on blocking reads, and may clear
//! the flag at any time. No system call requests a single non-blocking write: RWF_NOWAIT is for
//! files with write_iter, which eventfds do not have. Alternatives to write(2), such as a
//! completion of Linux AIO or of a separate ring, take two to three times as long.
//!
//! Therefore each thread announces its writes. A single watcher per process sends a signal to a
//! thread that it finds in the same write twice. The signal handler asks the kernel whether that
//! write would wait now: whether the eventfd blocks its writers and has no room (poll(2) without
//! POLLOUT). Only then does the handler put another eventfd in its place. Elapsed time proves
//! nothing, because a thread stays in its write while it is kept off the CPU.
//!
//! 2^64 - 2 signals do not accumulate by accident, so a peer with a full eventfd needs no further
//! ones. A peer may alternately drain and fill the counter, or toggle the flag. But it does not
//! know when the handler checks, so it delays a writer for a few checks at most. The watcher sleeps
//! while no thread signals.

use crate::kind::{ThreadKind, thread_starts};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

/// Interval between two checks by the watcher. A write that blocks lasts two intervals, or a few if
/// the peer manipulates its eventfd.
const TICK: Duration = Duration::from_millis(10);

/// Signal that interrupts a blocked writer; ignored by default and otherwise unused here.
const SIGNAL: i32 = libc::SIGURG;

/// The eventfd's counter was full, and writing to the eventfd blocked. The eventfd was replaced, so
/// the peer gets no further notifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer filled up the eventfd that notifies it")]
pub struct Full;

/// A thread that signals eventfds.
struct Writer {
    thread: libc::pid_t,
    /// Incremented before and after each write: odd during a write.
    turn: AtomicU64,
    /// The eventfd of the current write.
    fd: AtomicI32,
    /// `turn` of the write in which the watcher has found the thread twice.
    stuck: AtomicU64,
    /// `turn` of the last write whose eventfd was replaced.
    replaced: AtomicU64,
}

thread_local! {
    static REGISTERED: Registered = Registered::new();
    /// The registered writer, for the signal handler. Needs no initialisation and no destructor.
    static WRITER: Cell<*const Writer> = const { Cell::new(ptr::null()) };
}

static WRITERS: Mutex<Vec<Arc<Writer>>> = Mutex::new(Vec::new());
static WATCHER: Mutex<Option<Thread>> = Mutex::new(None);
/// The watcher is about to sleep until it is woken.
static ASLEEP: AtomicBool = AtomicBool::new(false);
/// Replaces full eventfds.
static REPLACEMENT: OnceLock<OwnedFd> = OnceLock::new();

/// Signals a peer's eventfd, which only this thread uses. A full counter is no error if the write
/// does not block, because the reader is notified anyway.
///
/// # Errors
/// [`Full`] if the write blocked and the eventfd was replaced.
#[inline]
pub fn signal(event: BorrowedFd<'_>) -> Result<(), Full> {
    let mut writer = WRITER.get();
    if writer.is_null() {
        // Fails only in a thread that is ending.
        let _ = REGISTERED.try_with(|registered| writer = Arc::as_ptr(&registered.0));
    }
    // SAFETY: null, or kept by this thread's registration until it ends.
    let Some(writer) = (unsafe { writer.as_ref() }) else {
        return Ok(());
    };
    writer.fd.store(event.as_raw_fd(), Relaxed);
    let turn = writer.turn.load(Relaxed) + 1;
    // Comes before the load of ASLEEP: see `Watch::rest`.
    writer.turn.swap(turn, SeqCst);
    if ASLEEP.load(SeqCst) {
        wake();
    }
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    writer.turn.store(turn + 1, Release);
    if writer.replaced.load(Relaxed) == turn {
        return Err(Full);
    }
    Ok(())
}

/// Registers this thread, which the first [`signal`] would otherwise do. Allocates memory.
pub fn prepare() {
    REGISTERED.with(|_| ());
}

/// Starts the watcher, unless it runs already. Without it, [`signal`] may block.
pub fn watch() -> io::Result<()> {
    let mut watcher = WATCHER.lock();
    if watcher.is_some() {
        return Ok(());
    }
    if REPLACEMENT.get().is_none() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // The lock is held, so no other thread sets it.
        let _ = REPLACEMENT.set(event);
    }
    install_handler()?;
    let thread = std::thread::Builder::new()
        .name("eventfd watch".into())
        .stack_size(128 << 10)
        .spawn(|| {
            thread_starts(ThreadKind::Watch);
            Watch::default().run()
        })?;
    *watcher = Some(thread.thread().clone());
    Ok(())
}

#[cold]
fn wake() {
    ASLEEP.store(false, SeqCst);
    let watcher = WATCHER.lock();
    if let Some(watcher) = &*watcher {
        watcher.unpark();
    }
}

fn writers() -> MutexGuard<'static, Vec<Arc<Writer>>> {
    WRITERS.lock()
}

/// The registration of this thread as a writer; ends with the thread.
struct Registered(Arc<Writer>);

impl Registered {
    #[cold]
    fn new() -> Registered {
        let writer = Arc::new(Writer {
            thread: rustix::thread::gettid().as_raw_pid(),
            turn: AtomicU64::new(0),
            fd: AtomicI32::new(-1),
            stuck: AtomicU64::new(0),
            replaced: AtomicU64::new(0),
        });
        let_through();
        WRITER.set(Arc::as_ptr(&writer));
        writers().push(writer.clone());
        Registered(writer)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        WRITER.set(ptr::null());
        writers().retain(|writer| !Arc::ptr_eq(writer, &self.0));
    }
}

/// Unblocks the signal, which the parent of this process may have blocked.
fn let_through() {
    // SAFETY: sigemptyset(3) initialises the set; pthread_sigmask(3) reads it.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, SIGNAL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut());
    }
}

fn install_handler() -> io::Result<()> {
    // SAFETY: `replace_if_stuck` is safe in signal handlers. The kernel restarts the write
    // afterwards (SA_RESTART), as well as any other call that the signal interrupts.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = replace_if_stuck as extern "C" fn(i32) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(SIGNAL, &action, ptr::null_mut())
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Replaces the eventfd that this thread writes to, if the write would wait
/// now. Uses only atomics, poll(2), fcntl(2) and dup3(2), all of which are safe
/// in signal handlers, and restores errno.
extern "C" fn replace_if_stuck(_: i32) {
    // SAFETY: null or registered, as in `signal`.
    let Some(writer) = (unsafe { WRITER.get().as_ref() }) else {
        return;
    };
    let turn = writer.turn.load(Relaxed);
    // The write may have returned before the signal arrived.
    if turn % 2 == 0 || writer.stuck.load(Acquire) != turn {
        return;
    }
    let Some(replacement) = REPLACEMENT.get() else {
        return;
    };
    // SAFETY: this thread is writing to it.
    let fd = unsafe { BorrowedFd::borrow_raw(writer.fd.load(Relaxed)) };
    // SAFETY: the location of this thread's errno, which is always valid.
    let errno = unsafe { *libc::__errno_location() };
    if would_wait(fd) {
        // SAFETY: both are open, and the owner of `fd` continues to own the number.
        let replaced =
            unsafe { libc::dup3(replacement.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) };
        if replaced >= 0 {
            writer.replaced.store(turn, Relaxed);
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Returns whether a write to this eventfd would block now. An error is no evidence: the watcher
/// makes the handler check again.
fn would_wait(fd: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    if poll(&mut polled, Some(&Timespec::default())).is_err() {
        return false;
    }
    let has_room = polled[0].revents().contains(PollFlags::OUT);
    !has_room && fcntl_getfl(fd).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK))
}

/// State of the watcher thread.
#[derive(Default)]
struct Watch {
    /// All writers with their turns, at the current check.
    now: Vec<(libc::pid_t, u64)>,
    /// The same, at the previous check.
    before: Vec<(libc::pid_t, u64)>,
}

impl Watch {
    fn run(mut self) {
        loop {
            if !self.look() {
                self.rest();
            }
            std::thread::sleep(TICK);
        }
    }

    /// Signals the writers that are stuck. Returns false if no thread has written since the
    /// previous check or is writing now.
    fn look(&mut self) -> bool {
        std::mem::swap(&mut self.now, &mut self.before);
        self.now.clear();
        let writers = writers();
        let turn = |writer: &Arc<Writer>| (writer.thread, writer.turn.load(SeqCst));
        self.now.extend(writers.iter().map(turn));
        for (writer, state) in writers.iter().zip(&self.now) {
            let (thread, turn) = *state;
            if turn % 2 == 1 && self.before.contains(state) {
                writer.stuck.store(turn, SeqCst);
                // SAFETY: a system call without memory. The thread exists: it leaves the list,
                // whose lock is held, before it ends.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) };
            }
        }
        self.now.iter().any(|(_, turn)| turn % 2 == 1) || self.now != self.before
    }

    /// Sleeps until a thread writes.
    fn rest(&mut self) {
        ASLEEP.store(true, SeqCst);
        // A writer that has not seen ASLEEP yet is seen by this check.
        if self.look() {
            ASLEEP.store(false, SeqCst);
            return;
        }
        while ASLEEP.load(SeqCst) {
            std::thread::park();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_testing::Deadline;
    use rustix::fs::fcntl_setfl;
    use std::os::fd::AsFd;

    fn full(flags: EventfdFlags) -> OwnedFd {
        let event = eventfd(0, flags).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event
    }

    fn count(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn an_eventfd_is_signalled() {
        watch().unwrap();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        for _ in 0..3 {
            signal(event.as_fd()).unwrap();
        }
        assert_eq!(count(&event), 3);
        // The watcher is asleep by then and must wake up again.
        std::thread::sleep(5 * TICK);
        signal(event.as_fd()).unwrap();
        assert_eq!(count(&event), 1);
    }

    #[test]
    fn nobody_waits_for_the_reader_of_a_full_one() {
        watch().unwrap();
        let event = full(EventfdFlags::empty());
        let peers = event.try_clone().unwrap();
        assert_eq!(signal(event.as_fd()), Err(Full));
        // The eventfd has been replaced.
        for _ in 0..3 {
            signal(event.as_fd()).unwrap();
        }
        assert_eq!(count(&peers), u64::MAX - 1);
        // A full eventfd that cannot block its writers stays.
        let event = full(EventfdFlags::NONBLOCK);
        signal(event.as_fd()).unwrap();
        assert_eq!(count(&event), u64::MAX - 1);
    }

    /// Interrupts a write to `event` `times` times, as the watcher does to a thread that is kept
    /// off the CPU during its write. Returns what [`signal`] would return.
    fn interrupted(event: BorrowedFd<'_>, times: u32) -> Result<(), Full> {
        prepare();
        // SAFETY: this thread is registered until it ends.
        let writer = unsafe { WRITER.get().as_ref() }.unwrap();
        writer.fd.store(event.as_raw_fd(), Relaxed);
        let turn = writer.turn.load(Relaxed) + 1;
        writer.turn.store(turn, SeqCst);
        for _ in 0..times {
            writer.stuck.store(turn, SeqCst);
            replace_if_stuck(SIGNAL);
        }
        writer.turn.store(turn + 1, SeqCst);
        match writer.replaced.load(Relaxed) == turn {
            true => Err(Full),
            false => Ok(()),
        }
    }

    #[test]
    fn eventfd_with_room_is_kept_when_its_writer_is_slow() {
        watch().unwrap();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let peers = event.try_clone().unwrap();
        assert_eq!(interrupted(event.as_fd(), 1000), Ok(()));
        signal(event.as_fd()).unwrap();
        assert_eq!(count(&peers), 1);
        // At one below the limit, the counter has room for one more signal.
        rustix::io::write(&event, &(u64::MAX - 2).to_ne_bytes()).unwrap();
        assert_eq!(interrupted(event.as_fd(), 1000), Ok(()));
        signal(event.as_fd()).unwrap();
        assert_eq!(count(&peers), u64::MAX - 1);
    }

    #[test]
    fn full_eventfd_is_replaced_only_if_its_writers_wait() {
        watch().unwrap();
        let event = full(EventfdFlags::NONBLOCK);
        assert_eq!(interrupted(event.as_fd(), 1000), Ok(()));
        signal(event.as_fd()).unwrap();
        assert_eq!(count(&event), u64::MAX - 1);
        let event = full(EventfdFlags::empty());
        assert_eq!(interrupted(event.as_fd(), 1), Err(Full));
    }

    /// The peer toggles the flag and drains and fills the counter, while this side signals.
    #[test]
    fn a_flag_that_comes_and_goes_holds_nobody_up() {
        watch().unwrap();
        let ours = full(EventfdFlags::NONBLOCK);
        let theirs = ours.try_clone().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let peer = std::thread::spawn({
            let stop = stop.clone();
            move || {
                while !stop.load(Relaxed) {
                    for flags in [OFlags::NONBLOCK, OFlags::empty()] {
                        fcntl_setfl(&theirs, flags).unwrap();
                    }
                    let mut polled = [PollFd::new(&theirs, PollFlags::OUT)];
                    if poll(&mut polled, Some(&Timespec::default())) == Ok(1) {
                        fcntl_setfl(&theirs, OFlags::NONBLOCK).unwrap();
                        let _ = rustix::io::read(&theirs, &mut [0; 8]);
                        let _ = rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes());
                    }
                }
            }
        });
        let deadline = Deadline::new("an eventfd that keeps its writer waiting");
        while signal(ours.as_fd()) == Ok(()) {
            deadline.check();
        }
        stop.store(true, Relaxed);
        peer.join().unwrap();
        signal(ours.as_fd()).unwrap();
    }

    #[test]
    fn a_thread_that_ends_is_forgotten() {
        watch().unwrap();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let gone = std::thread::spawn(move || {
            signal(event.as_fd()).unwrap();
            rustix::thread::gettid().as_raw_pid()
        });
        let gone = gone.join().unwrap();
        assert!(writers().iter().all(|writer| writer.thread != gone));
    }
}
