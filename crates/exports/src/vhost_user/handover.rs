//! Hands over an export from one process to another. The export's front-end may be in the middle of
//! a message.
//!
//! Both ends run on the serving thread; another thread triggers the steps:
//!
//! ```text
//! old: freeze ── state ──► ... ── halt ── bases ──► ...    (or it resumes, if the handover fails)
//! new:      adopt ──► prepared    activate ──► active    run ──► serving
//! ```
//!
//! While an export is frozen, it handles no messages and accepts no front-ends; these wait in the
//! sockets. The export's queues run until it is halted.

use super::Shared;
use super::serve::{Connection, serve};
use super::session::{SessionState, UnfinishedState};
use fathom_sockets::{Descriptors, Listener, ListenerState};
use fathom_units::cause;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

/// Saved state of an export. File numbers are indices into the list of files that accompanies it.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExportState {
    listener: ListenerState,
    connection: Option<ConnectionState>,
}

impl ExportState {
    /// Returns true if a front-end is connected.
    pub fn is_in_use(&self) -> bool {
        self.connection.is_some()
    }

    /// Returns true if the front-end is in the middle of a message, which a successor must
    /// continue.
    pub fn has_unfinished_message(&self) -> bool {
        let connection = self.connection.as_ref();
        connection
            .is_some_and(|open| open.unfinished.is_some() || open.session.has_unfinished_reply())
    }

    /// Returns true if the guest's driver uses packed virtqueues.
    pub fn has_packed_queues(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(|open| open.session.has_packed_queues())
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ConnectionState {
    pub(super) socket: usize,
    /// The front-end has sent a message.
    pub(super) spoke: bool,
    pub(super) session: SessionState,
    /// The received part of an incomplete message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unfinished: Option<UnfinishedState>,
}

/// Error for a serving thread that takes too long or has ended.
const SILENT: &str = "the thread that serves the front-end does not respond";

/// Timeout for the serving thread to finish the current message and freeze.
const FREEZE: Duration = Duration::from_secs(2);

type Described = Result<(ExportState, Descriptors), String>;

/// Request to a serving thread to freeze.
pub(super) struct Freeze {
    reply: SyncSender<Described>,
    orders: Receiver<Order>,
}

enum Order {
    /// Stop the queues as well, and reply with their positions.
    Halt(SyncSender<Halted>),
    /// The handover has failed: resume, and reply.
    GoOn(SyncSender<()>),
    /// Another export of this process takes over the session.
    LetGo,
}

/// Result of a freeze for the serving thread.
pub(super) enum Attended {
    GoesOn,
    /// Another export has taken over the session; none of it may be touched.
    Gone,
}

type Halted = Result<Vec<u32>, String>;

/// A frozen export. Dropping it resumes the export.
pub struct Frozen {
    /// The state to hand over, with its files.
    pub state: Option<ExportState>,
    /// Files to which the state refers by their indexes.
    pub descriptors: Descriptors,
    orders: Sender<Order>,
}

impl Frozen {
    pub(super) fn new(shared: &Shared) -> Result<Frozen, String> {
        let (reply, described) = sync_channel(1);
        let (orders, receiver) = channel();
        *shared.freeze() = Some(Freeze {
            reply,
            orders: receiver,
        });
        shared.handover.notify();
        let (state, descriptors) = described.recv_timeout(FREEZE).map_err(|_| SILENT)??;
        Ok(Frozen {
            state: Some(state),
            descriptors,
            orders,
        })
    }

    /// Starts to stop the queues and to release the disk; does not wait for it.
    pub fn begin_halt(&self) -> Halting {
        let (reply, bases) = sync_channel(1);
        let _ = self.orders.send(Order::Halt(reply));
        Halting(bases)
    }

    /// Resumes the export, since no process has taken it over. Does not wait until it has resumed.
    pub fn go_on(self) -> GoingOn {
        let (reply, done) = sync_channel(1);
        let _ = self.orders.send(Order::GoOn(reply));
        GoingOn(done)
    }

    /// Gives up the session to another export of this process; this export serves no front-end any
    /// more.
    pub fn let_go(self) {
        let _ = self.orders.send(Order::LetGo);
    }

    /// Leaves the export frozen for good, since another process has taken over and this one is
    /// about to exit.
    pub fn leave(self) {
        std::mem::forget(self.orders);
    }
}

/// An export that is resuming.
pub struct GoingOn(Receiver<()>);

impl GoingOn {
    /// Waits until the export has resumed, but at most for `patience`.
    pub fn wait(self, patience: Duration) {
        let _ = self.0.recv_timeout(patience);
    }
}

/// Queues that are being stopped.
pub struct Halting(Receiver<Halted>);

impl Halting {
    /// Returns the positions of the stopped queues.
    ///
    /// # Errors
    /// The queues are not stopped by `deadline`, or the disk cannot be closed.
    pub fn wait(self, deadline: Instant) -> Result<Vec<u32>, String> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.0.recv_timeout(left).map_err(|error| match error {
            RecvTimeoutError::Timeout => "requests in flight do not end".to_owned(),
            RecvTimeoutError::Disconnected => SILENT.to_owned(),
        })?
    }
}

/// Handles a request to freeze, on the serving thread. After an error the connection must be
/// closed.
pub(super) fn attend(
    shared: &Shared,
    listener: &Listener,
    mut connection: Option<&mut Connection<'_>>,
) -> Result<Attended, String> {
    shared.handover.clear();
    let Some(Freeze { reply, orders }) = shared.freeze().take() else {
        return Ok(Attended::GoesOn);
    };
    let described = describe(listener, connection.as_deref());
    let is_frozen = described.is_ok();
    if reply.send(described).is_err() || !is_frozen {
        return Ok(Attended::GoesOn);
    }
    let mut has_halted = false;
    let told = loop {
        match orders.recv() {
            Ok(Order::Halt(reply)) => {
                let session = connection.as_mut().map(|open| &mut open.session);
                let bases = session.map_or(Ok(Vec::new()), |session| session.halt());
                has_halted = true;
                let _ = reply.send(bases);
            }
            Ok(Order::GoOn(reply)) => break Some(reply),
            Ok(Order::LetGo) => {
                listener.disown();
                return Ok(Attended::Gone);
            }
            Err(_) => break None,
        }
    };
    let went_on = match connection {
        Some(Connection { session, .. }) if has_halted => {
            let ready = session.make_ready(None);
            ready.and_then(|ready| session.run(ready))
        }
        _ => Ok(()),
    };
    if let Some(told) = told {
        let _ = told.send(());
    }
    went_on.map(|()| Attended::GoesOn)
}

fn describe(listener: &Listener, connection: Option<&Connection<'_>>) -> Described {
    let mut descriptors = Descriptors::default();
    let failed = |error| format!("cannot duplicate a file descriptor: {}", cause(error));
    let socket = listener.hand_over(&mut descriptors).map_err(failed)?;
    let connection = connection.map(|open| open.describe(&mut descriptors));
    let state = ExportState {
        listener: socket,
        connection: connection.transpose()?,
    };
    Ok((state, descriptors))
}

/// The state that an export takes over from its predecessor.
pub struct Arrival {
    state: ExportState,
    descriptors: Descriptors,
    steps: Receiver<Step>,
    done: SyncSender<Result<(), String>>,
}

enum Step {
    Activate(Vec<u32>),
    Run,
}

/// An export that is taking over. If this is dropped before [`Arriving::run`], the export ends.
pub struct Arriving {
    steps: Sender<Step>,
    done: Receiver<Result<(), String>>,
}

/// Creates the two ends of a take-over: one for
/// [`VhostUser::serve_on`](super::VhostUser::serve_on), and one for the thread that triggers the
/// steps.
pub fn arrival(state: ExportState, descriptors: Descriptors) -> (Arriving, Arrival) {
    let (steps, receiver) = channel();
    let (reply, done) = sync_channel(1);
    let arrival = Arrival {
        state,
        descriptors,
        steps: receiver,
        done: reply,
    };
    (Arriving { steps, done }, arrival)
}

impl Arriving {
    /// Waits for the end of the last step; the first step is the adoption of the state.
    pub fn wait(&self) -> Result<(), String> {
        self.done.recv().map_err(|_| SILENT.to_owned())?
    }

    /// Starts to activate the disk, after the predecessor has stopped its queues at `bases`; does
    /// not wait for it.
    pub fn begin_to_activate(&self, bases: Vec<u32>) {
        let _ = self.steps.send(Step::Activate(bases));
    }

    /// Starts serving, after the predecessor can no longer resume.
    pub fn run(&self) {
        let _ = self.steps.send(Step::Run);
    }
}

/// Implements [`VhostUser::serve_on`](super::VhostUser::serve_on).
pub(super) fn serve_on(shared: &Shared, arrival: Arrival) -> io::Result<()> {
    let Arrival {
        state,
        mut descriptors,
        steps,
        done,
    } = arrival;
    let taken = Listener::adopt(state.listener, &mut descriptors).and_then(|(listener, bound)| {
        let adopt = |state| Connection::adopt(shared, state, &mut descriptors);
        Ok((listener, bound, state.connection.map(adopt).transpose()?))
    });
    let (listener, bound, mut connection) = match taken {
        Ok(taken) => taken,
        Err(problem) => {
            let _ = done.send(Err(problem));
            return Ok(());
        }
    };
    let _ = done.send(Ok(()));
    let mut ready = None;
    loop {
        match (steps.recv(), &mut connection) {
            (Ok(Step::Activate(bases)), Some(open)) => {
                let made = open.session.make_ready(Some(&bases));
                let _ = done.send(made.map(|made| ready = Some(made)));
            }
            (Ok(Step::Activate(_)), None) => drop(done.send(Ok(()))),
            (Ok(Step::Run), _) => break,
            // The predecessor resumes.
            (Err(_), _) => return Ok(()),
        }
    }
    listener.own(bound);
    connection.iter_mut().for_each(|open| open.is_gone = false);
    if let (Some(open), Some(ready)) = (&mut connection, ready)
        && let Err(problem) = open.session.run(ready)
    {
        tracing::error!("vhost-user: closing the connection: {problem}");
        connection = None;
    }
    serve(shared, &listener, connection)
}
