//! A worker as the other threads see it: commands in, counters out.

use crate::cx::Cx;
use crate::disk::{Disk, DiskError};
use crate::engine::Engine;
use crate::peer_event;
use crate::polling::{Poller, Polling};
use crate::source::{Source, SourceId};
use crate::worker::Worker;
use fathom_trace::{Clock, Recorder, RingWriter, StageHistograms};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_setaffinity, set_current_timer_slack};
use std::convert::Infallible;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker may take to look into its mailbox. One that works does so
/// after each turn; one that does not is stuck in guest memory whose pages do
/// not come, say, and might never look again.
const PATIENCE: Duration = Duration::from_secs(3);

/// What other threads ask of a worker.
pub(crate) enum Command {
    Attach {
        source: Box<dyn Source>,
        wanted: Arc<Wanted>,
        reply: SyncSender<io::Result<SourceId>>,
    },
    Detach {
        id: SourceId,
        reply: SyncSender<Box<dyn Source>>,
    },
    Trace(Option<RingWriter>),
    /// Something that the channel goes by has changed.
    Look {
        wanted: Arc<Wanted>,
        reply: SyncSender<()>,
    },
    Stop,
}

/// Whether a command is waited for: decided once, by the worker that takes it
/// or by the one who has waited for too long.
#[derive(Default)]
pub(crate) struct Wanted(AtomicBool);

impl Wanted {
    /// False: the other side has decided before.
    fn decide(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }
}

/// The flag and the eventfd by which a worker learns of commands, spinning
/// or asleep.
struct Bell {
    rung: AtomicBool,
    event: OwnedFd,
    /// Somebody has waited in vain, and no command was taken since.
    unheard: AtomicBool,
}

impl Bell {
    /// Wait no longer. False: the worker has just taken the command. (The
    /// order matters: the worker decides first and lowers the flag then, so
    /// that it is not raised for good.)
    fn give_up(&self, wanted: &Wanted) -> bool {
        self.unheard.store(true, Ordering::SeqCst);
        let given_up = wanted.decide();
        if !given_up {
            self.unheard.store(false, Ordering::SeqCst);
        }
        given_up
    }
}

/// The worker's end of its mailbox.
pub(crate) struct Inbox {
    commands: Receiver<Command>,
    bell: Arc<Bell>,
}

impl Inbox {
    pub(crate) fn fd(&self) -> RawFd {
        self.bell.event.as_raw_fd()
    }

    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.bell.rung.load(Ordering::Acquire)
    }

    /// A command has been taken. False: nobody waits for it any more.
    pub(crate) fn hear(&self, wanted: &Wanted) -> bool {
        let in_time = wanted.decide();
        self.bell.unheard.store(false, Ordering::SeqCst);
        in_time
    }

    /// The next command. Senders ring after they have sent, so the bell is
    /// silenced before the last look.
    pub(crate) fn take(&self) -> Option<Command> {
        if !self.has_mail() {
            return None;
        }
        if let Ok(command) = self.commands.try_recv() {
            return Some(command);
        }
        self.bell.rung.store(false, Ordering::SeqCst);
        let last = self.commands.try_recv().ok();
        if last.is_some() {
            self.bell.rung.store(true, Ordering::SeqCst);
        }
        last
    }
}

/// A count with one writer.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn increment(&self) {
        self.add(1);
    }

    #[inline]
    pub(crate) fn add(&self, n: u64) {
        let count = self.0.load(Ordering::Relaxed);
        self.0.store(count + n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a worker did besides moving requests.
#[derive(Default)]
pub struct Counters {
    /// Interrupts sent.
    pub notifications: Counter,
    /// Times that it went to sleep.
    pub sleeps: Counter,
    /// Ticks of the clock in which it looked for work instead of sleeping.
    pub polled: Counter,
    /// Requests that sources have answered with an error by themselves.
    pub refused: Counter,
}

/// How to run a worker.
#[derive(Clone, Debug, Default)]
pub struct WorkerOptions {
    /// The thread's name (the kernel keeps 15 bytes).
    pub name: String,
    pub polling: Polling,
    /// The CPUs that it may run on; empty: any.
    pub cpus: Vec<usize>,
}

/// Stops the worker when dropped.
pub struct WorkerHandle {
    commands: Sender<Command>,
    bell: Arc<Bell>,
    histograms: Arc<StageHistograms>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
    /// Its other end is the thread's, and goes with it.
    running: Mutex<Receiver<Infallible>>,
}

/// The worker has not looked into its mailbox for so long that it seems to be
/// stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its worker does not answer")]
pub struct Unheard;

impl WorkerHandle {
    /// Start a worker for `disk`. `engine` is called on the new thread,
    /// which alone uses what it returns.
    pub fn spawn(
        disk: Arc<dyn Disk>,
        engine: impl FnOnce() -> io::Result<Box<dyn Engine>> + Send + 'static,
        options: WorkerOptions,
    ) -> Result<WorkerHandle, DiskError> {
        let failed = |what: &'static str| {
            let path = PathBuf::from(options.name.clone());
            move |source: io::Error| DiskError::Io { path, what, source }
        };
        peer_event::watch().map_err(failed("cannot start the thread that watches eventfds"))?;
        let bell = Arc::new(Bell {
            rung: AtomicBool::new(false),
            unheard: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|e| failed("cannot create an eventfd")(e.into()))?,
        });
        let (commands, receiver) = channel();
        let inbox = Inbox {
            commands: receiver,
            bell: bell.clone(),
        };
        let histograms = Arc::new(StageHistograms::default());
        let recorder = Recorder::new(histograms.clone());
        let counters = Arc::new(Counters::default());
        let (ready, started) = sync_channel(1);
        let (alive, running) = sync_channel(1);
        let body = {
            let (counters, options) = (counters.clone(), options.clone());
            move || {
                let _alive: SyncSender<Infallible> = alive;
                peer_event::prepare();
                let worker = start(&*disk, engine, inbox, recorder, counters, &options);
                match worker {
                    Ok(worker) => {
                        let _ = ready.send(Ok(()));
                        worker.run();
                    }
                    Err(error) => drop(ready.send(Err(error))),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name(options.name.clone())
            .spawn(body)
            .map_err(failed("cannot start its thread"))?;
        started.recv().expect("the worker reports its start")?;
        Ok(WorkerHandle {
            commands,
            bell,
            histograms,
            counters,
            thread: Some(thread),
            running: Mutex::new(running),
        })
    }

    /// What is sent to a worker that has ended already is dropped, and with it
    /// the means to answer.
    fn send(&self, command: Command) {
        let _ = self.commands.send(command);
        self.bell.rung.store(true, Ordering::SeqCst);
        // An eventfd's counter cannot overflow by ones.
        let _ = rustix::io::write(&self.bell.event, &1u64.to_ne_bytes());
    }

    /// Let the worker serve `source`; returns when it does. If it does not
    /// take it in time, the source is dropped, sooner or later.
    pub fn attach(&self, source: Box<dyn Source>) -> io::Result<SourceId> {
        let failed = || io::Error::new(io::ErrorKind::TimedOut, Unheard);
        if self.bell.unheard.load(Ordering::SeqCst) {
            return Err(failed());
        }
        let (reply, answer) = sync_channel(1);
        let wanted = Arc::new(Wanted::default());
        self.send(Command::Attach {
            source,
            wanted: wanted.clone(),
            reply,
        });
        match answer.recv_timeout(PATIENCE) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) if self.bell.give_up(&wanted) => Err(failed()),
            // It is at it.
            Err(RecvTimeoutError::Timeout) => answer.recv().unwrap_or_else(|_| Err(failed())),
            Err(RecvTimeoutError::Disconnected) => Err(failed()),
        }
    }

    /// Stop popping from a source, wait for everything in flight, and give
    /// the source back. Afterwards the worker touches none of its memory.
    pub fn detach(&self, id: SourceId) -> Box<dyn Source> {
        self.begin_detach(id).wait()
    }

    /// Like [`WorkerHandle::detach`], without waiting: for several at once.
    pub fn begin_detach(&self, id: SourceId) -> Detaching {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Detach { id, reply });
        Detaching(answer)
    }

    /// Switch tracing on or off, without waiting for it: a peer may go on with
    /// an answer before that is traced. After a [`WorkerHandle::look`], what
    /// comes is traced, or what was answered before is in the trace.
    pub fn trace(&self, writer: Option<RingWriter>) {
        self.send(Command::Trace(writer));
    }

    /// Let the channel look at what has changed ([`Channel::timer`]); returns
    /// when it has, unless the worker is stuck. Requests popped later go by it.
    ///
    /// [`Channel::timer`]: crate::Channel::timer
    pub fn look(&self) -> Result<(), Unheard> {
        self.begin_look().wait()
    }

    /// Like [`WorkerHandle::look`], without waiting: for several at once.
    pub fn begin_look(&self) -> Looking<'_> {
        let (reply, answer) = sync_channel(1);
        let wanted = Arc::new(Wanted::default());
        let patience = match self.bell.unheard.load(Ordering::SeqCst) {
            true => Duration::ZERO,
            false => PATIENCE,
        };
        self.send(Command::Look {
            wanted: wanted.clone(),
            reply,
        });
        Looking {
            answer,
            wanted,
            deadline: Instant::now() + patience,
            bell: &self.bell,
        }
    }

    /// Let the worker end, which has no sources any more; does not wait.
    pub fn stop(&self) {
        self.send(Command::Stop);
    }

    /// Wait for its end until `deadline`. False: it is not over.
    pub fn wait_until_stopped(&self, deadline: Instant) -> bool {
        let running = self.running.lock().unwrap_or_else(|e| e.into_inner());
        let left = deadline.saturating_duration_since(Instant::now());
        running.recv_timeout(left) == Err(RecvTimeoutError::Disconnected)
    }

    pub fn histograms(&self) -> &StageHistograms {
        &self.histograms
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}

/// A worker that was told to look.
pub struct Looking<'a> {
    answer: Receiver<()>,
    wanted: Arc<Wanted>,
    deadline: Instant,
    bell: &'a Bell,
}

impl Looking<'_> {
    pub fn wait(self) -> Result<(), Unheard> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.answer.recv_timeout(left) {
            Ok(()) => Ok(()),
            // It is at it.
            Err(RecvTimeoutError::Timeout) if !self.bell.give_up(&self.wanted) => {
                self.answer.recv_timeout(PATIENCE).map_err(|_| Unheard)
            }
            Err(_) => Err(Unheard),
        }
    }
}

/// A source on its way back.
pub struct Detaching(Receiver<Box<dyn Source>>);

impl Detaching {
    pub fn wait(self) -> Box<dyn Source> {
        self.0.recv().expect("a worker answers")
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// On the worker's thread: everything that can fail.
fn start(
    disk: &dyn Disk,
    engine: impl FnOnce() -> io::Result<Box<dyn Engine>>,
    inbox: Inbox,
    recorder: Recorder,
    counters: Arc<Counters>,
    options: &WorkerOptions,
) -> Result<Worker, DiskError> {
    let failed = |what: &'static str| {
        let path = PathBuf::from(options.name.clone());
        move |source: io::Error| DiskError::Io { path, what, source }
    };
    if !options.cpus.is_empty() {
        let mut set = CpuSet::new();
        options.cpus.iter().for_each(|cpu| set.set(*cpu));
        sched_setaffinity(None, &set).map_err(|e| failed("cannot be pinned to CPUs")(e.into()))?;
    }
    // What is timed is timed exactly: the default adds up to 50 us to a wait.
    set_current_timer_slack(NonZeroU64::new(1))
        .map_err(|e| failed("cannot set its timer slack")(e.into()))?;
    let mut cx = Cx::new(engine().map_err(failed("cannot start its engine"))?);
    let channel = disk.channel(&mut cx)?;
    let poller = Poller::new(options.polling, Clock::get());
    Worker::new(cx, channel, inbox, poller, recorder, counters).map_err(failed("cannot start"))
}
