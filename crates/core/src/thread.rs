//! Worker threads: starts them, pins them, and creates their engine and mailbox.

use crate::disk::DiskError;
use crate::engine::Engine;
use crate::kind::{ThreadKind, thread_starts};
use crate::mailbox::{Inbox, Outbox, mailbox};
use crate::peer_event;
use crate::polling::{Poller, Polling};
use fathom_trace::Clock;
use rustix::thread::{CpuSet, gettid, sched_setaffinity, set_current_timer_slack};
use std::io;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

/// Options of a worker thread, which may run one worker or several.
#[derive(Clone, Debug, Default)]
pub struct WorkerOptions {
    /// Name of the thread (the kernel keeps 15 bytes).
    pub name: String,
    /// How the thread polls before it sleeps.
    pub polling: Polling,
    /// CPUs on which the thread may run; empty for all.
    pub cpus: Vec<usize>,
}

/// Components of a thread's loop.
pub(crate) struct Parts {
    pub(crate) engine: Box<dyn Engine>,
    pub(crate) inbox: Inbox,
    pub(crate) poller: Poller,
}

/// Converts an I/O error of the thread `name` into a [`DiskError`].
pub(crate) fn failed(name: &str, what: &'static str) -> impl Fn(io::Error) -> DiskError {
    let path = PathBuf::from(name);
    move |source| DiskError::Io {
        path: path.clone(),
        what,
        source,
    }
}

/// A running thread.
pub(crate) struct Started {
    pub(crate) outbox: Outbox,
    pub(crate) thread: JoinHandle<()>,
    pub(crate) id: ThreadId,
}

/// Kernel thread id of a thread of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId(pub i32);

impl ThreadId {
    fn current() -> ThreadId {
        ThreadId(gettid().as_raw_nonzero().get())
    }

    /// Returns the CPU time that the thread has used, or none if the thread has ended.
    pub fn cpu_time(self) -> Option<Duration> {
        // Bits with which the kernel and pthread_getcpuclockid(3) encode a thread id as a clock id.
        const PER_THREAD: i32 = 4;
        const SCHED: i32 = 2;
        ThreadId::read_clock((!self.0 << 3) | PER_THREAD | SCHED)
    }

    /// Returns the CPU time that all threads of this process have used.
    pub fn process_cpu_time() -> Duration {
        ThreadId::read_clock(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or_default()
    }

    fn read_clock(clock: libc::clockid_t) -> Option<Duration> {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `time` is a valid timespec to write to; a clock that does not exist is an error.
        match unsafe { libc::clock_gettime(clock, &mut time) } {
            0 => Some(Duration::new(time.tv_sec as u64, time.tv_nsec as u32)),
            _ => None,
        }
    }
}

/// Starts a thread, which creates its engine with `engine` and runs the function that `make`
/// returns. Waits for the thread's initialisation and returns its error.
pub(crate) fn start<Run: FnOnce()>(
    options: WorkerOptions,
    engine: impl FnOnce() -> io::Result<Box<dyn Engine>> + Send + 'static,
    make: impl FnOnce(Parts) -> Result<Run, DiskError> + Send + 'static,
) -> Result<Started, DiskError> {
    let name = options.name.clone();
    let failed = |what| failed(&name, what);
    peer_event::watch().map_err(failed("cannot start the thread that watches eventfds"))?;
    let (outbox, inbox) = mailbox().map_err(failed("cannot create an eventfd"))?;
    let (ready, started) = sync_channel(1);
    let body = move || {
        peer_event::prepare();
        let parts = prepare(&options, engine, inbox);
        match parts.and_then(make) {
            Ok(run) => {
                thread_starts(ThreadKind::Worker);
                let _ = ready.send(Ok(ThreadId::current()));
                run();
            }
            Err(error) => drop(ready.send(Err(error))),
        }
    };
    let thread = std::thread::Builder::new().name(name.clone()).spawn(body);
    let thread = thread.map_err(failed("cannot start the worker's thread"))?;
    let id = started.recv().expect("the thread reports its start")?;
    Ok(Started { outbox, thread, id })
}

/// Prepares the current, new thread.
fn prepare(
    options: &WorkerOptions,
    engine: impl FnOnce() -> io::Result<Box<dyn Engine>>,
    inbox: Inbox,
) -> Result<Parts, DiskError> {
    let failed = |what| failed(&options.name, what);
    if !options.cpus.is_empty() {
        let mut set = CpuSet::new();
        options.cpus.iter().for_each(|cpu| set.set(*cpu));
        sched_setaffinity(None, &set).map_err(|e| failed("cannot be pinned to CPUs")(e.into()))?;
    }
    // Timeouts must be accurate: the default slack adds up to 50 us to a wait.
    set_current_timer_slack(NonZeroU64::new(1))
        .map_err(|e| failed("cannot set the worker's timer slack")(e.into()))?;
    Ok(Parts {
        engine: engine().map_err(failed("cannot start the worker's I/O engine"))?,
        inbox,
        poller: Poller::new(options.polling, Clock::get()),
    })
}
