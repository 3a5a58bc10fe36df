//! Commands that other threads send to a worker, and how the worker notices them.

use crate::changes::Changes;
use crate::counters::Counters;
use crate::disk::{Disk, DiskError};
use crate::event_notifier::EventNotifier;
use crate::oldest::Oldest;
use crate::source::{Eventfd, Source, SourceId};
use fathom_trace::{Recorder, RingWriter};
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};

/// A command for a worker.
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
    /// Replaces an eventfd of a source. The reply returns the previous one.
    SetEventfd {
        id: SourceId,
        which: Eventfd,
        fd: Option<OwnedFd>,
        wanted: Arc<Wanted>,
        reply: SyncSender<io::Result<Option<OwnedFd>>>,
    },
    Trace(Option<RingWriter>),
    /// Starts or stops recording which parts of the disk change.
    Note(Option<Arc<Changes>>),
    /// Something that the channel depends on has changed.
    Look {
        wanted: Arc<Wanted>,
        reply: SyncSender<()>,
    },
    /// Replies with the request that has been in flight for longest.
    Oldest {
        reply: SyncSender<Option<Oldest>>,
    },
    /// Replies when the requests that the disk has now have ended.
    Settle {
        reply: SyncSender<()>,
    },
    Stop,
}

/// Address of a worker on a thread. (A worker with its own thread is the only one there.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) member: u16,
    /// Distinguishes the member from an earlier one with the same number.
    pub(crate) serial: u64,
}

/// A message to a worker thread.
pub(crate) enum Message {
    To(Address, Command),
    /// Adds a worker to a pool's thread.
    Join(Box<Joining>),
    /// Ends a pool's thread, which has no workers any more.
    End,
}

/// A worker to be added to a pool's thread.
pub(crate) struct Joining {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) recorder: Recorder,
    pub(crate) counters: Arc<Counters>,
    pub(crate) pin_memory: bool,
    /// Dropped together with the worker.
    pub(crate) alive: SyncSender<Infallible>,
    pub(crate) reply: SyncSender<Result<Address, DiskError>>,
}

/// Whether the sender still waits for a command's result. Decided once: by the worker that takes
/// the command, or by a sender whose timeout has expired.
#[derive(Default)]
pub(crate) struct Wanted(AtomicBool);

impl Wanted {
    /// Decides. Returns false if the other side has decided first.
    fn decide(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }
}

/// Announces commands to a worker: a flag for a worker that spins, and an eventfd for one that
/// sleeps.
pub(crate) struct WorkerWaker {
    is_signalled: AtomicBool,
    event: EventNotifier,
    /// A sender has timed out, and the worker has taken no command since.
    is_unresponsive: AtomicBool,
}

impl WorkerWaker {
    fn new() -> io::Result<WorkerWaker> {
        Ok(WorkerWaker {
            is_signalled: AtomicBool::new(false),
            is_unresponsive: AtomicBool::new(false),
            event: EventNotifier::new()?,
        })
    }

    /// Records that the worker has taken a command. Returns false if the sender has given up.
    pub(crate) fn took_command(&self, wanted: &Wanted) -> bool {
        let in_time = wanted.decide();
        self.is_unresponsive.store(false, Ordering::SeqCst);
        in_time
    }

    /// Gives up waiting. Returns false if the worker has just taken the command. The worker decides
    /// first and clears the flag afterwards, so the flag does not stay set for good.
    pub(crate) fn give_up(&self, wanted: &Wanted) -> bool {
        self.is_unresponsive.store(true, Ordering::SeqCst);
        let given_up = wanted.decide();
        if !given_up {
            self.is_unresponsive.store(false, Ordering::SeqCst);
        }
        given_up
    }
}

/// Creates a thread's mailbox: the end for senders and the end for the thread.
pub(crate) fn mailbox() -> io::Result<(Outbox, Inbox)> {
    let waker = Arc::new(WorkerWaker::new()?);
    let (sender, messages) = channel();
    let inbox = Inbox {
        messages,
        waker: waker.clone(),
    };
    let outbox = Outbox {
        messages: sender,
        waker,
        to: Address::default(),
    };
    Ok((outbox, inbox))
}

/// The senders' end of a mailbox, addressed to one worker.
#[derive(Clone)]
pub(crate) struct Outbox {
    messages: Sender<Message>,
    waker: Arc<WorkerWaker>,
    to: Address,
}

impl Outbox {
    /// Returns an outbox for another worker of the same thread.
    pub(crate) fn to(&self, to: Address) -> Outbox {
        Outbox { to, ..self.clone() }
    }

    /// Sends a command to the worker. If the worker has ended, the command and its reply channel
    /// are dropped.
    pub(crate) fn send(&self, command: Command) {
        self.send_message(Message::To(self.to, command));
    }

    /// Sends a letter to the thread.
    pub(crate) fn send_message(&self, message: Message) {
        let _ = self.messages.send(message);
        self.waker.is_signalled.store(true, Ordering::SeqCst);
        self.waker.event.notify();
    }

    /// Returns whether a sender has timed out and the worker has taken no command since.
    pub(crate) fn is_unresponsive(&self) -> bool {
        self.waker.is_unresponsive.load(Ordering::SeqCst)
    }

    pub(crate) fn waker(&self) -> &WorkerWaker {
        &self.waker
    }
}

/// The thread's end of its mailbox.
pub(crate) struct Inbox {
    messages: Receiver<Message>,
    waker: Arc<WorkerWaker>,
}

impl Inbox {
    pub(crate) fn fd(&self) -> RawFd {
        self.waker.event.as_raw_fd()
    }

    pub(crate) fn waker(&self) -> &Arc<WorkerWaker> {
        &self.waker
    }

    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.waker.is_signalled.load(Ordering::Acquire)
    }

    /// Takes the next letter. Senders set the flag after sending, so the flag is cleared before the
    /// last check of the queue.
    #[inline]
    pub(crate) fn take(&self) -> Option<Message> {
        if !self.has_mail() {
            return None;
        }
        if let Ok(message) = self.messages.try_recv() {
            return Some(message);
        }
        self.waker.is_signalled.store(false, Ordering::SeqCst);
        let last = self.messages.try_recv().ok();
        if last.is_some() {
            self.waker.is_signalled.store(true, Ordering::SeqCst);
        }
        last
    }
}
