//! A worker as the other threads see it: commands in, counters out.

use crate::changes::Changes;
use crate::counters::Counters;
use crate::cx::Cx;
use crate::dedicated::Dedicated;
use crate::disk::{Disk, DiskError};
use crate::engine::Engine;
use crate::mailbox::{Bell, Command, Joining, Letter, Outbox, Wanted};
use crate::oldest::Oldest;
use crate::seat::Seat;
use crate::source::{Eventfd, Source, SourceId};
use crate::thread::{self, Parts, Started, ThreadId, WorkerOptions, failed};
use crate::worker::Worker;
use fathom_trace::{Recorder, RingWriter, StageHistograms};
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker may take to look into its mailbox. One that works does so
/// after each turn; one that does not is stuck in guest memory whose pages do
/// not come, say, and might never look again.
const PATIENCE: Duration = Duration::from_secs(3);

/// Stops the worker when dropped.
pub struct WorkerHandle {
    outbox: Outbox,
    histograms: Arc<StageHistograms>,
    counters: Arc<Counters>,
    thread_id: ThreadId,
    /// Its own, if it has one.
    thread: Option<JoinHandle<()>>,
    /// Where it is in a pool otherwise.
    _seat: Option<Seat>,
    /// Its other end is the worker's, and goes with it.
    running: Mutex<Receiver<Infallible>>,
}

/// The worker has not looked into its mailbox for so long that it seems to be
/// stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker did not respond within 3 s")]
pub struct Unheard;

impl WorkerHandle {
    /// Start a worker for `disk` with a thread of its own. `engine` is called on
    /// the new thread, which alone uses what it returns.
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
                let worker = Worker::new(cx, channel, inbox.bell().clone(), recorder, counters);
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

    /// A worker for `disk` on a pool's thread.
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
        thread.post(Letter::Join(Box::new(Joining {
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

    /// Let the worker serve `source`; returns when it does. If it does not
    /// take it in time, the source is dropped, sooner or later.
    pub fn attach(&self, source: Box<dyn Source>) -> io::Result<SourceId> {
        let failed = || io::Error::new(io::ErrorKind::TimedOut, Unheard);
        if self.outbox.is_unheard() {
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
            Err(RecvTimeoutError::Timeout) if self.outbox.bell().give_up(&wanted) => Err(failed()),
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
        self.outbox.send(Command::Detach { id, reply });
        Detaching(answer)
    }

    /// Replaces an eventfd of an attached source; requests in flight stay there. Returns when the
    /// worker uses the new eventfd, or with an error if the worker cannot watch it. A worker that is
    /// stuck ([`Unheard`]) replaces the eventfd when it reads its mailbox again.
    pub fn set_eventfd(
        &self,
        id: SourceId,
        which: Eventfd,
        fd: Option<OwnedFd>,
    ) -> Result<io::Result<()>, Unheard> {
        let looking = self.ask(|wanted, reply| Command::SetEventfd {
            id,
            which,
            fd,
            wanted,
            reply,
        });
        // The previous eventfd is closed here: closing may wait for whoever made it.
        looking.wait().map(|replaced| replaced.map(drop))
    }

    /// Switch tracing on or off, without waiting for it: a peer may go on with
    /// an answer before that is traced. After a [`WorkerHandle::look`], what
    /// comes is traced, or what was answered before is in the trace.
    pub fn trace(&self, writer: Option<RingWriter>) {
        self.outbox.send(Command::Trace(writer));
    }

    /// Have noted what is changed by requests that end from now on, or no longer; does not wait for it: see
    /// [`WorkerHandle::trace`]. It is noted before a source is given back that has asked for it.
    pub fn note_changes(&self, changes: Option<Arc<Changes>>) {
        self.outbox.send(Command::Note(changes));
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
        self.ask(|wanted, reply| Command::Look { wanted, reply })
    }

    /// Sends a command whose reply is waited for as long as the worker is not stuck.
    fn ask<T>(
        &self,
        command: impl FnOnce(Arc<Wanted>, SyncSender<T>) -> Command,
    ) -> Looking<'_, T> {
        let (reply, answer) = sync_channel(1);
        let wanted = Arc::new(Wanted::default());
        let patience = match self.outbox.is_unheard() {
            true => Duration::ZERO,
            false => PATIENCE,
        };
        self.outbox.send(command(wanted.clone(), reply));
        Looking {
            answer,
            wanted,
            deadline: Instant::now() + patience,
            bell: self.outbox.bell(),
        }
    }

    /// Waits for the requests that the disk has taken on from this worker by then.
    pub fn begin_settle(&self) -> Settling {
        let (reply, answer) = sync_channel(1);
        self.outbox.send(Command::Settle { reply });
        Settling(answer)
    }

    /// Asks for the request that is in flight for longest; a worker that is stuck says nothing.
    pub fn begin_oldest(&self) -> Receiver<Option<Oldest>> {
        let (reply, answer) = sync_channel(1);
        self.outbox.send(Command::Oldest { reply });
        answer
    }

    /// Let the worker end, which has no sources any more; does not wait.
    pub fn stop(&self) {
        self.outbox.send(Command::Stop);
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

    /// Of the thread that it is on, which other disks' workers may share.
    pub fn thread_id(&self) -> ThreadId {
        self.thread_id
    }
}

/// A worker that was sent a command; its reply is a `T`.
pub struct Looking<'a, T = ()> {
    answer: Receiver<T>,
    wanted: Arc<Wanted>,
    deadline: Instant,
    bell: &'a Bell,
}

impl<T> Looking<'_, T> {
    pub fn wait(self) -> Result<T, Unheard> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.answer.recv_timeout(left) {
            Ok(reply) => Ok(reply),
            // It is at it.
            Err(RecvTimeoutError::Timeout) if !self.bell.give_up(&self.wanted) => {
                self.answer.recv_timeout(PATIENCE).map_err(|_| Unheard)
            }
            Err(_) => Err(Unheard),
        }
    }
}

/// A worker whose disk's requests are waited for.
pub struct Settling(Receiver<()>);

impl Settling {
    /// False: they have not ended by `deadline`.
    pub fn wait(self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        self.0.recv_timeout(left) != Err(RecvTimeoutError::Timeout)
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
        match self.thread.take() {
            Some(thread) => drop(thread.join()),
            None => {
                let running = self.running.get_mut().unwrap_or_else(|e| e.into_inner());
                // It says nothing; it ends.
                let _ = running.recv();
            }
        }
    }
}
