//! Signals eventfds that belong to a peer without ever waiting for the peer.
//!
//! A write to an eventfd whose counter is full sleeps until somebody reads the
//! eventfd, unless O_NONBLOCK is set. The peer shares that flag: it may rely on
//! blocking reads, and it may clear the flag at any instant. No system call
//! asks for one write that does not wait (RWF_NOWAIT is for files with
//! write_iter, which eventfds do not have), and ways around write(2), such as a
//! completion of Linux AIO or of a ring of its own, take two to three times as
//! long.
//!
//! So each thread announces its writes, and one watcher for the whole process
//! sends a signal to a thread that it finds in the same write twice. The signal's
//! handler asks the kernel whether that write would wait now: whether the
//! eventfd blocks its writers and has no room (poll(2) without POLLOUT). Only
//! then does the handler put another eventfd in its place. Time proves nothing: a
//! thread that is kept off the CPU stays in its write for as long as that takes.
//! Nobody lets 2^64 - 2 signals pile up by accident, so a peer whose eventfd is
//! full needs no more of them. A peer that empties and fills the counter in
//! turns, or toggles the flag, does not know when the handler looks, so it holds
//! up a writer for a few looks at most. The watcher sleeps while nobody signals.

use crate::kind::{ThreadKind, thread_starts};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::Thread;
use std::time::Duration;

/// How often the watcher looks, so that no write takes longer than two of
/// these.
const TICK: Duration = Duration::from_millis(10);

/// Ignored by default, and of no use to anybody here.
const SIGNAL: i32 = libc::SIGURG;

/// The eventfd's counter was full, and writing to it waited. It was replaced:
/// the peer does not hear of anything any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer filled up the eventfd that notifies it")]
pub struct Full;

/// A thread that signals.
struct Writer {
    thread: libc::pid_t,
    /// Counts twice a write: odd while in one.
    turn: AtomicU64,
    /// What it writes to.
    fd: AtomicI32,
    /// The write that the watcher has found it in twice.
    stuck: AtomicU64,
    /// The last write whose eventfd was replaced.
    replaced: AtomicU64,
}

thread_local! {
    static REGISTERED: Registered = Registered::new();
    /// What is registered, for the signal handler: it needs no initialisation
    /// and no destructor.
    static WRITER: Cell<*const Writer> = const { Cell::new(ptr::null()) };
}

static WRITERS: Mutex<Vec<Arc<Writer>>> = Mutex::new(Vec::new());
static WATCHER: Mutex<Option<Thread>> = Mutex::new(None);
/// The watcher is about to sleep until it is woken.
static ASLEEP: AtomicBool = AtomicBool::new(false);
/// Takes the place of a full eventfd.
static REPLACEMENT: OnceLock<OwnedFd> = OnceLock::new();

/// Signal an eventfd of a peer; it is used by this thread only. If its counter
/// is full, its reader has enough to wake up to: that is no error as long as
/// it does not make this thread wait.
#[inline]
pub fn signal(event: BorrowedFd<'_>) -> Result<(), Full> {
    let mut writer = WRITER.get();
    if writer.is_null() {
        // It fails only for a thread that has almost ended.
        let _ = REGISTERED.try_with(|registered| writer = Arc::as_ptr(&registered.0));
    }
    // SAFETY: null, or kept by this thread's registration until it ends.
    let Some(writer) = (unsafe { writer.as_ref() }) else {
        return Ok(());
    };
    writer.fd.store(event.as_raw_fd(), Relaxed);
    let turn = writer.turn.load(Relaxed) + 1;
    // Before ASLEEP is looked at: see `Watch::rest`.
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

/// Do now what the first [`signal`] of this thread would do, which allocates.
pub fn prepare() {
    REGISTERED.with(|_| ());
}

/// Start the watcher, unless there is one. Without it, [`signal`] may wait.
pub fn watch() -> io::Result<()> {
    let mut watcher = WATCHER.lock().unwrap_or_else(|e| e.into_inner());
    if watcher.is_some() {
        return Ok(());
    }
    if REPLACEMENT.get().is_none() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // Nobody else does: the lock is held.
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
    let watcher = WATCHER.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(watcher) = &*watcher {
        watcher.unpark();
    }
}

fn writers() -> MutexGuard<'static, Vec<Arc<Writer>>> {
    WRITERS.lock().unwrap_or_else(|e| e.into_inner())
}

/// This thread among the writers; no more when it ends.
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

/// The parent of this process may have blocked the signal.
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
    // SAFETY: `replace_if_stuck` is safe in signal handlers. The write goes on
    // after it (SA_RESTART), and so does whatever it interrupts by mistake.
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
        // SAFETY: both are open, and who owns `fd` goes on owning the number.
        let replaced =
            unsafe { libc::dup3(replacement.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) };
        if replaced >= 0 {
            writer.replaced.store(turn, Relaxed);
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Whether a write to this eventfd would wait at this instant. An error is no
/// evidence: the watcher makes the handler look again.
fn would_wait(fd: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    if poll(&mut polled, Some(&Timespec::default())).is_err() {
        return false;
    }
    let has_room = polled[0].revents().contains(PollFlags::OUT);
    !has_room && fcntl_getfl(fd).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK))
}

/// The watcher.
#[derive(Default)]
struct Watch {
    /// All threads with their turns.
    now: Vec<(libc::pid_t, u64)>,
    /// Likewise, at the last look.
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

    /// Free those who are stuck. False: nobody has written since the last
    /// look, nor does now.
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
                // SAFETY: a system call without memory. The thread is there: it
                // leaves the list, whose lock is held, before it ends.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) };
            }
        }
        self.now.iter().any(|(_, turn)| turn % 2 == 1) || self.now != self.before
    }

    /// Sleep until somebody writes.
    fn rest(&mut self) {
        ASLEEP.store(true, SeqCst);
        // Who has not seen that yet has been seen here.
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
        // The watcher is asleep by then, and may be needed again.
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
        // From now on it is another one.
        for _ in 0..3 {
            signal(event.as_fd()).unwrap();
        }
        assert_eq!(count(&peers), u64::MAX - 1);
        // One that cannot make anybody wait stays.
        let event = full(EventfdFlags::NONBLOCK);
        signal(event.as_fd()).unwrap();
        assert_eq!(count(&event), u64::MAX - 1);
    }

    /// Has the watcher interrupt a write to `event` `times` times, as happens to a thread that
    /// is kept off the CPU in the middle of it. Returns what [`signal`] would return.
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
    fn eventfd_with_room_is_not_replaced_however_long_its_writer_takes() {
        watch().unwrap();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let peers = event.try_clone().unwrap();
        assert_eq!(interrupted(event.as_fd(), 1000), Ok(()));
        signal(event.as_fd()).unwrap();
        assert_eq!(count(&peers), 1);
        // One below the limit, there is room for one more signal.
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

    /// A peer that plays with its flag and its counter, while this side signals.
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
