//! What other threads ask of a worker, and how it hears of it.

use crate::changes::Changes;
use crate::counters::Counters;
use crate::disk::{Disk, DiskError};
use crate::oldest::Oldest;
use crate::source::{Eventfd, Source, SourceId};
use fathom_trace::{Recorder, RingWriter};
use rustix::event::{EventfdFlags, eventfd};
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};

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
    /// Replace an eventfd of a source. The reply returns the previous one.
    SetEventfd {
        id: SourceId,
        which: Eventfd,
        fd: Option<OwnedFd>,
        wanted: Arc<Wanted>,
        reply: SyncSender<io::Result<Option<OwnedFd>>>,
    },
    Trace(Option<RingWriter>),
    /// Note what is changed.
    Note(Option<Arc<Changes>>),
    /// Something that the channel goes by has changed.
    Look {
        wanted: Arc<Wanted>,
        reply: SyncSender<()>,
    },
    /// Say which request is in flight for longest.
    Oldest {
        reply: SyncSender<Option<Oldest>>,
    },
    /// Reply when the requests have ended that the disk has now.
    Settle {
        reply: SyncSender<()>,
    },
    Stop,
}

/// Which worker of a thread is meant. (A worker with a thread of its own is the only one.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) member: u16,
    /// Tells it from an earlier one of that number.
    pub(crate) serial: u64,
}

/// What the thread of a worker is sent.
pub(crate) enum Letter {
    To(Address, Command),
    /// A pool's thread gets one more worker.
    Join(Box<Joining>),
    /// A pool's thread is to end; it has no workers any more.
    End,
}

/// A worker that a pool's thread is to have.
pub(crate) struct Joining {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) recorder: Recorder,
    pub(crate) counters: Arc<Counters>,
    pub(crate) pin_memory: bool,
    /// Goes with the worker.
    pub(crate) alive: SyncSender<Infallible>,
    pub(crate) reply: SyncSender<Result<Address, DiskError>>,
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
pub(crate) struct Bell {
    rung: AtomicBool,
    event: OwnedFd,
    /// Somebody has waited in vain, and no command was taken since.
    unheard: AtomicBool,
}

impl Bell {
    fn new() -> io::Result<Bell> {
        Ok(Bell {
            rung: AtomicBool::new(false),
            unheard: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// A command has been taken. False: nobody waits for it any more.
    pub(crate) fn hear(&self, wanted: &Wanted) -> bool {
        let in_time = wanted.decide();
        self.unheard.store(false, Ordering::SeqCst);
        in_time
    }

    /// Wait no longer. False: the worker has just taken the command. (The
    /// order matters: the worker decides first and lowers the flag then, so
    /// that it is not raised for good.)
    pub(crate) fn give_up(&self, wanted: &Wanted) -> bool {
        self.unheard.store(true, Ordering::SeqCst);
        let given_up = wanted.decide();
        if !given_up {
            self.unheard.store(false, Ordering::SeqCst);
        }
        given_up
    }
}

/// A thread's mailbox, for who writes to it and for the thread.
pub(crate) fn mailbox() -> io::Result<(Outbox, Inbox)> {
    let bell = Arc::new(Bell::new()?);
    let (sender, letters) = channel();
    let inbox = Inbox {
        letters,
        bell: bell.clone(),
    };
    let outbox = Outbox {
        letters: sender,
        bell,
        to: Address::default(),
    };
    Ok((outbox, inbox))
}

/// The other threads' end of it, for writing to one worker.
#[derive(Clone)]
pub(crate) struct Outbox {
    letters: Sender<Letter>,
    bell: Arc<Bell>,
    to: Address,
}

impl Outbox {
    /// For another worker of the same thread.
    pub(crate) fn to(&self, to: Address) -> Outbox {
        Outbox { to, ..self.clone() }
    }

    /// What is sent to a worker that has ended already is dropped, and with it
    /// the means to answer.
    pub(crate) fn send(&self, command: Command) {
        self.post(Letter::To(self.to, command));
    }

    /// The same, for the thread.
    pub(crate) fn post(&self, letter: Letter) {
        let _ = self.letters.send(letter);
        self.bell.rung.store(true, Ordering::SeqCst);
        // An eventfd's counter cannot overflow by ones.
        let _ = rustix::io::write(&self.bell.event, &1u64.to_ne_bytes());
    }

    /// Whether somebody has waited in vain, and no command was taken since.
    pub(crate) fn is_unheard(&self) -> bool {
        self.bell.unheard.load(Ordering::SeqCst)
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }
}

/// The thread's end of its mailbox.
pub(crate) struct Inbox {
    letters: Receiver<Letter>,
    bell: Arc<Bell>,
}

impl Inbox {
    pub(crate) fn fd(&self) -> RawFd {
        self.bell.event.as_raw_fd()
    }

    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.bell.rung.load(Ordering::Acquire)
    }

    /// The next letter. Senders ring after they have sent, so the bell is
    /// silenced before the last look.
    #[inline]
    pub(crate) fn take(&self) -> Option<Letter> {
        if !self.has_mail() {
            return None;
        }
        if let Ok(letter) = self.letters.try_recv() {
            return Some(letter);
        }
        self.bell.rung.store(false, Ordering::SeqCst);
        let last = self.letters.try_recv().ok();
        if last.is_some() {
            self.bell.rung.store(true, Ordering::SeqCst);
        }
        last
    }
}
