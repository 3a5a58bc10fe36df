//! Handles of workers for other threads: send commands, read counters.

use crate::changes::Changes;
use crate::counters::Counters;
use crate::cx::Cx;
use crate::dedicated::Dedicated;
use crate::disk::{Disk, DiskError};
use crate::engine::Engine;
use crate::mailbox::{Command, Joining, Message, Outbox, Wanted, WorkerWaker};
use crate::oldest::Oldest;
use crate::seat::Seat;
use crate::source::{Eventfd, Source, SourceId};
use crate::thread::{self, Parts, Started, ThreadId, WorkerOptions, failed};
use crate::worker::Worker;
use fathom_trace::{Recorder, RingWriter, StageHistograms};
use parking_lot::Mutex;
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Timeout for a worker to read its mailbox. A working worker reads it after each turn. A worker
/// that does not read it may be blocked, for example by guest memory whose pages do not arrive, and
/// may never read it again.
const PATIENCE: Duration = Duration::from_secs(3);

/// A handle to a worker. Dropping the handle stops the worker.
pub struct WorkerHandle {
    outbox: Outbox,
    histograms: Arc<StageHistograms>,
    counters: Arc<Counters>,
    thread_id: ThreadId,
    /// The worker's own thread, if it has one.
    thread: Option<JoinHandle<()>>,
    /// The worker's place in a pool, if it has no thread of its own.
    _seat: Option<Seat>,
    /// Disconnected when the worker ends, because the worker owns the other end.
    running: Mutex<Receiver<Infallible>>,
}

/// The worker has not read its mailbox within the timeout, so it seems to be stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker did not respond within 3 s")]
pub struct Unresponsive;

impl WorkerHandle {
    /// Starts a worker for `disk` with a thread of its own. Calls `engine` on the new thread, which
    /// alone uses the result.
    pub fn spawn(
        disk: Arc<dyn Disk>,
        engine: impl FnOnce() -> io::Result<Box<dyn Engine>> + Send + 'static,
        options: WorkerOptions,
    ) -> Result<WorkerHandle, DiskError> {
        let histograms = Arc::new(StageHistograms::default());
        let recorder = Recorder::new(histograms.clone());
        let counters = Arc::new(Counters::default());
        let (alive, running) = sync_channel(1);
        let name = options.name.clone();
        let body = {
            let counters = counters.clone();
            move |Parts {
                      engine,
                      inbox,
                      poller,
                  }| {
                let mut cx = Cx::new(engine);
                let channel = disk.channel(&mut cx)?;
                let worker = Worker::new(cx, channel, inbox.waker().clone(), recorder, counters);
                let worker = Dedicated::new(worker, inbox, poller);
                let worker = worker.map_err(failed(&name, "cannot start"))?;
                Ok(move || {
                    let _alive: SyncSender<Infallible> = alive;
                    worker.run();
                    drop(disk);
                })
            }
        };
        let Started { outbox, thread, id } = thread::start(options, engine, body)?;
        Ok(WorkerHandle {
            outbox,
            histograms,
            counters,
            thread_id: id,
            thread: Some(thread),
            _seat: None,
            running: Mutex::new(running),
        })
    }

    /// Starts a worker for `disk` on a pool's thread.
    pub(crate) fn join(
        seat: Seat,
        disk: Arc<dyn Disk>,
        pin_memory: bool,
    ) -> Result<WorkerHandle, DiskError> {
        let histograms = Arc::new(StageHistograms::default());
        let counters = Arc::new(Counters::default());
        let (alive, running) = sync_channel(1);
        let (reply, answer) = sync_channel(1);
        let thread = seat.outbox();
        thread.send_message(Message::Join(Box::new(Joining {
            disk,
            recorder: Recorder::new(histograms.clone()),
            counters: counters.clone(),
            pin_memory,
            alive,
            reply,
        })));
        let address = answer.recv().expect("a pool's thread answers")?;
        Ok(WorkerHandle {
            outbox: thread.to(address),
            histograms,
            counters,
            thread_id: seat.thread_id(),
            thread: None,
            _seat: Some(seat),
            running: Mutex::new(running),
        })
    }

    /// Attaches `source`; returns when the worker serves it. If the worker does not respond in
    /// time, the source is dropped, sooner or later.
    pub fn attach(&self, source: Box<dyn Source>) -> io::Result<SourceId> {
        let failed = || io::Error::new(io::ErrorKind::TimedOut, Unresponsive);
        if self.outbox.is_unresponsive() {
            return Err(failed());
        }
        let (reply, answer) = sync_channel(1);
        let wanted = Arc::new(Wanted::default());
        self.outbox.send(Command::Attach {
            source,
            wanted: wanted.clone(),
            reply,
        });
        match answer.recv_timeout(PATIENCE) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) if self.outbox.waker().give_up(&wanted) => Err(failed()),
            // The worker has just taken the command.
            Err(RecvTimeoutError::Timeout) => answer.recv().unwrap_or_else(|_| Err(failed())),
            Err(RecvTimeoutError::Disconnected) => Err(failed()),
        }
    }

    /// Stops popping from a source, waits for everything in flight, and returns the source.
    /// Afterwards the worker does not access its memory.
    pub fn detach(&self, id: SourceId) -> Box<dyn Source> {
        self.begin_detach(id).wait()
    }

    /// Like [`WorkerHandle::detach`], without waiting: to detach several sources at once.
    pub fn begin_detach(&self, id: SourceId) -> Detaching {
        let (reply, answer) = sync_channel(1);
        self.outbox.send(Command::Detach { id, reply });
        Detaching(answer)
    }

    /// Replaces an eventfd of an attached source; requests in flight stay there. Returns when the
    /// worker uses the new eventfd, or with an error if the worker cannot watch it. A worker that
    /// is stuck ([`Unresponsive`]) replaces the eventfd when it reads its mailbox again.
    pub fn set_eventfd(
        &self,
        id: SourceId,
        which: Eventfd,
        fd: Option<OwnedFd>,
    ) -> Result<io::Result<()>, Unresponsive> {
        let looking = self.ask(|wanted, reply| Command::SetEventfd {
            id,
            which,
            fd,
            wanted,
            reply,
        });
        // The previous eventfd is closed on this thread, because closing it may block.
        looking.wait().map(|replaced| replaced.map(drop))
    }

    /// Starts or stops tracing, without waiting for the worker. A peer may continue with a reply
    /// before the reply is traced. After a subsequent [`WorkerHandle::look`], new requests are
    /// traced, or all earlier replies are in the trace.
    pub fn trace(&self, writer: Option<RingWriter>) {
        self.outbox.send(Command::Trace(writer));
    }

    /// Starts or stops recording changes of requests that end from now on. Does not wait for the
    /// worker, see [`WorkerHandle::trace`]. A request's changes are recorded before its source is
    /// given back.
    pub fn note_changes(&self, changes: Option<Arc<Changes>>) {
        self.outbox.send(Command::Note(changes));
    }

    /// Lets the channel act on changed state ([`Channel::timer`]). Returns when it has done so,
    /// unless the worker is stuck. Requests popped later see the new state.
    ///
    /// [`Channel::timer`]: crate::Channel::timer
    pub fn look(&self) -> Result<(), Unresponsive> {
        self.begin_look().wait()
    }

    /// Like [`WorkerHandle::look`], without waiting: to notify several workers at once.
    pub fn begin_look(&self) -> Looking<'_> {
        self.ask(|wanted, reply| Command::Look { wanted, reply })
    }

    /// Sends a command and returns its pending reply. The wait for the reply ends if the worker is
    /// stuck.
    fn ask<T>(
        &self,
        command: impl FnOnce(Arc<Wanted>, SyncSender<T>) -> Command,
    ) -> Looking<'_, T> {
        let (reply, answer) = sync_channel(1);
        let wanted = Arc::new(Wanted::default());
        let patience = match self.outbox.is_unresponsive() {
            true => Duration::ZERO,
            false => PATIENCE,
        };
        self.outbox.send(command(wanted.clone(), reply));
        Looking {
            answer,
            wanted,
            deadline: Instant::now() + patience,
            waker: self.outbox.waker(),
        }
    }

    /// Starts waiting for the requests that the disk has accepted from this worker by then.
    pub fn begin_settle(&self) -> Settling {
        let (reply, answer) = sync_channel(1);
        self.outbox.send(Command::Settle { reply });
        Settling(answer)
    }

    /// Requests the oldest request in flight. A worker that is stuck does not reply.
    pub fn begin_oldest(&self) -> Receiver<Option<Oldest>> {
        let (reply, answer) = sync_channel(1);
        self.outbox.send(Command::Oldest { reply });
        answer
    }

    /// Tells the worker to end, without waiting. The worker must have no sources any more.
    pub fn stop(&self) {
        self.outbox.send(Command::Stop);
    }

    /// Waits for the end of the worker until `deadline`. Returns false if it has not ended by then.
    pub fn wait_until_stopped(&self, deadline: Instant) -> bool {
        let running = self.running.lock();
        let left = deadline.saturating_duration_since(Instant::now());
        running.recv_timeout(left) == Err(RecvTimeoutError::Disconnected)
    }

    /// Returns the stage times of all requests that this worker has answered.
    pub fn histograms(&self) -> &StageHistograms {
        &self.histograms
    }

    /// Returns the counters of this worker, which change while it runs.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the id of the worker's thread, which workers of other disks may share.
    pub fn thread_id(&self) -> ThreadId {
        self.thread_id
    }
}

/// The pending reply, a `T`, to a command sent to a worker.
pub struct Looking<'a, T = ()> {
    answer: Receiver<T>,
    wanted: Arc<Wanted>,
    deadline: Instant,
    waker: &'a WorkerWaker,
}

impl<T> Looking<'_, T> {
    /// Waits for the reply, until a timeout that began when the command was sent.
    ///
    /// # Errors
    /// The worker has not replied in time, or has ended.
    pub fn wait(self) -> Result<T, Unresponsive> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.answer.recv_timeout(left) {
            Ok(reply) => Ok(reply),
            // The worker has just taken the command.
            Err(RecvTimeoutError::Timeout) if !self.waker.give_up(&self.wanted) => {
                self.answer.recv_timeout(PATIENCE).map_err(|_| Unresponsive)
            }
            Err(_) => Err(Unresponsive),
        }
    }
}

/// A pending wait for the end of a disk's requests.
pub struct Settling(Receiver<()>);

impl Settling {
    /// Waits for the requests. Returns false if they have not ended by `deadline`.
    pub fn wait(self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        self.0.recv_timeout(left) != Err(RecvTimeoutError::Timeout)
    }
}

/// The pending return of a source that is being detached.
pub struct Detaching(Receiver<Box<dyn Source>>);

impl Detaching {
    /// Waits until the source's requests have ended and the worker returns the source.
    ///
    /// # Panics
    /// The worker ends without returning the source.
    pub fn wait(self) -> Box<dyn Source> {
        self.0.recv().expect("a worker answers")
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        self.stop();
        match self.thread.take() {
            Some(thread) => drop(thread.join()),
            None => {
                let running = self.running.get_mut();
                // The worker sends nothing; the receiver is disconnected when the worker ends.
                let _ = running.recv();
            }
        }
    }
}
