//! Pool of threads that make blocking system calls for a worker.

use fathom_core::{Completion, EventNotifier, Io, IoKind, ThreadKind, Token, thread_starts};
use fathom_units::cause;
use libc::iovec;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum number of threads; they are started when there is work for them.
const MAX_THREADS: usize = 64;

/// Time after which a thread without work ends.
const IDLE: Duration = Duration::from_secs(10);

/// Maximum number of iovecs in one call (UIO_MAXIOV).
const MAX_IOVECS: u32 = 1024;

/// linux/fs.h
const BLKDISCARD: libc::Ioctl = 0x1277;

/// A blocking call to make.
#[derive(Clone, Copy)]
struct Job {
    fd: RawFd,
    io: Io,
    /// Copy of the iovec, if there is only one, so that the original need not stay in place.
    one: Option<iovec>,
    token: Token,
}

// SAFETY: the pusher keeps the iovecs and their memory valid until it has seen the completion, no
// matter which thread uses them.
unsafe impl Send for Job {}

/// State shared by the threads and the worker.
struct Shared {
    work: Mutex<Work>,
    wake: Condvar,
    done: Mutex<Vec<Completion>>,
    /// Number of completions in `done`.
    ready: AtomicUsize,
    /// Whether the worker sleeps, or is about to, so that a completion must signal the event.
    sleeping: AtomicBool,
    event: EventNotifier,
}

struct Work {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    stopping: bool,
}

/// A worker's pool.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    /// Jobs that were pushed and not yet handed to the threads.
    queued: Vec<Job>,
    handles: Vec<JoinHandle<()>>,
}

impl Pool {
    pub(crate) fn new() -> io::Result<Pool> {
        let event = EventNotifier::new()?;
        Ok(Pool {
            shared: Arc::new(Shared {
                work: Mutex::new(Work {
                    jobs: VecDeque::new(),
                    threads: 0,
                    idle: 0,
                    stopping: false,
                }),
                wake: Condvar::new(),
                done: Mutex::new(Vec::new()),
                ready: AtomicUsize::new(0),
                sleeping: AtomicBool::new(false),
                event,
            }),
            queued: Vec::new(),
            handles: Vec::new(),
        })
    }

    /// Returns the eventfd that is signalled when a job completes while the worker sleeps.
    pub(crate) fn event(&self) -> RawFd {
        self.shared.event.as_raw_fd()
    }

    /// Reserves room for `n` jobs, so that pushing and completing allocate no memory.
    pub(crate) fn reserve(&mut self, n: usize) {
        self.queued.reserve(n.saturating_sub(self.queued.len()));
        let mut work = self.shared.work.lock();
        let more = n.saturating_sub(work.jobs.len());
        work.jobs.reserve(more);
        drop(work);
        let mut done = self.shared.done.lock();
        let more = n.saturating_sub(done.len());
        done.reserve(more);
    }

    /// # Safety
    /// As for [`Engine::push`](fathom_core::Engine::push); `fd` stays open
    /// until the completion has been seen.
    pub(crate) unsafe fn push(&mut self, fd: RawFd, io: Io, token: Token) {
        let with_data = matches!(io.kind, IoKind::Read | IoKind::Write { .. });
        // SAFETY: the caller vouches that there is one iovec.
        let one = (with_data && io.iov_len == 1).then(|| unsafe { *io.iov });
        self.queued.push(Job { fd, io, one, token });
    }

    /// Returns the number of jobs that have not been handed to the threads.
    pub(crate) fn queued(&self) -> usize {
        self.queued.len()
    }

    /// Returns whether `reap` would find completions. Takes no lock.
    #[inline]
    pub(crate) fn ready(&self) -> bool {
        self.shared.ready.load(Ordering::Acquire) > 0
    }

    /// Hands all queued jobs to the threads under one lock.
    pub(crate) fn submit(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let mut work = self.shared.work.lock();
        work.jobs.extend(self.queued.drain(..));
        let wanted = work.jobs.len().saturating_sub(work.idle);
        let missing = wanted.min(MAX_THREADS - work.threads);
        let wake = work.jobs.len().min(work.idle);
        work.threads += missing;
        drop(work);
        for _ in 0..wake {
            self.shared.wake.notify_one();
        }
        (0..missing).for_each(|_| self.start_thread());
    }

    fn start_thread(&mut self) {
        self.handles.retain(|handle| !handle.is_finished());
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("fathom-io".into());
        match thread.spawn(move || shared.run()) {
            Ok(handle) => self.handles.push(handle),
            Err(error) => self.shared.could_not_start(error),
        }
    }

    /// Appends completions to `out`.
    pub(crate) fn reap(&mut self, out: &mut Vec<Completion>) {
        if !self.ready() {
            return;
        }
        let mut done = self.shared.done.lock();
        self.shared.ready.store(0, Ordering::Relaxed);
        out.append(&mut done);
    }

    /// Announces that the worker is going to sleep. Returns false if it must not, because jobs have
    /// completed.
    pub(crate) fn before_sleep(&self) -> bool {
        self.shared.sleeping.store(true, Ordering::SeqCst);
        if self.shared.ready.load(Ordering::SeqCst) > 0 {
            self.after_sleep();
            return false;
        }
        true
    }

    pub(crate) fn after_sleep(&self) {
        self.shared.sleeping.store(false, Ordering::Relaxed);
    }
}

impl Shared {
    /// Runs jobs until the thread must stop.
    fn run(&self) {
        thread_starts(ThreadKind::Io);
        while let Some(job) = self.next() {
            let result = job.run();
            self.complete(Completion {
                token: job.token,
                result,
            });
        }
    }

    /// Returns the next job, or None if the thread must stop.
    fn next(&self) -> Option<Job> {
        let mut work = self.work.lock();
        loop {
            if let Some(job) = work.jobs.pop_front() {
                return Some(job);
            }
            if work.stopping {
                work.threads -= 1;
                return None;
            }
            work.idle += 1;
            let timeout = self.wake.wait_for(&mut work, IDLE);
            work.idle -= 1;
            if timeout.timed_out() && work.jobs.is_empty() {
                work.threads -= 1;
                return None;
            }
        }
    }

    fn complete(&self, completion: Completion) {
        let mut done = self.done.lock();
        done.push(completion);
        self.ready.store(done.len(), Ordering::SeqCst);
        drop(done);
        if self.sleeping.load(Ordering::SeqCst) && self.sleeping.swap(false, Ordering::SeqCst) {
            self.event.notify();
        }
    }

    /// Accounts for a thread that could not be started. If no thread is left, fails all waiting
    /// jobs.
    fn could_not_start(&self, error: io::Error) {
        tracing::warn!(
            "cannot start a thread for I/O, so fewer requests run at the same time: {}",
            cause(error)
        );
        let mut work = self.work.lock();
        work.threads -= 1;
        if work.threads > 0 {
            return;
        }
        let orphans: Vec<Job> = work.jobs.drain(..).collect();
        drop(work);
        for job in orphans {
            self.complete(Completion {
                token: job.token,
                result: -libc::ENOMEM,
            });
        }
    }
}

/// Waits for the jobs in flight, which use memory that the pool does not own.
impl Drop for Pool {
    fn drop(&mut self) {
        self.submit();
        self.shared.work.lock().stopping = true;
        self.shared.wake.notify_all();
        for handle in self.handles.drain(..) {
            let _ = handle.join();
        }
    }
}

impl Job {
    /// Makes the call. Returns the number of bytes moved or a negative errno.
    fn run(&self) -> i32 {
        let io = &self.io;
        let (offset, len) = (io.offset as i64, io.len as i64);
        let iov = self.one.as_ref().map_or(io.iov, std::ptr::from_ref);
        let count = io.iov_len.min(MAX_IOVECS) as i32;
        // SAFETY: for reads and writes the iovecs are valid until the completion; the other calls
        // use no memory.
        let result = unsafe {
            match io.kind {
                IoKind::Read => libc::preadv(self.fd, iov, count, offset),
                IoKind::Write { dsync } => {
                    let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                    libc::pwritev2(self.fd, iov, count, offset, flags)
                }
                IoKind::Sync => libc::fdatasync(self.fd) as isize,
                IoKind::Allocate { mode } if mode == super::DEVICE_DISCARD => {
                    let range = [io.offset, io.len];
                    libc::ioctl(self.fd, BLKDISCARD, &range) as isize
                }
                IoKind::Allocate { mode } => libc::fallocate(self.fd, mode, offset, len) as isize,
            }
        };
        if result < 0 {
            return -io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO);
        }
        result as i32
    }
}
