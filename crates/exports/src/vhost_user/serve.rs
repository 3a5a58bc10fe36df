//! The serving thread: accepts front-ends and dispatches their messages.

use super::Shared;
use super::codec::{CodecError, Frame, Header, MAX_PAYLOAD, Received, Receiver, name, send};
use super::handover::{Attended, ConnectionState, attend};
use super::session::{Fault, Reply, Session, UnfinishedState};
use crate::watch::Visit;
use fathom_sockets::{Descriptors, Listener};
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Maximum number of messages handled before the other events are checked.
const BATCH: usize = 64;

/// Time without accepting front-ends after accept(2) failed for lack of resources.
const ACCEPT_PAUSE: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Implements [`super::VhostUser::serve`].
pub fn serve<'a>(
    shared: &'a Shared,
    listener: &Listener,
    mut connection: Option<Connection<'a>>,
) -> io::Result<()> {
    listener.set_nonblocking()?;
    let mut pause_accept = false;
    loop {
        let ready = wait(shared, listener, connection.as_ref(), pause_accept)?;
        if ready.stop {
            // Unbound before the connection ends, since its front-end would reconnect at once.
            listener.unbind();
            return Ok(());
        }
        let mut idle = true;
        if let Some(open) = &mut connection {
            match open.turn(&ready) {
                Ok(Progress::Idle) => {}
                Ok(Progress::More) => idle = false,
                Ok(Progress::Closed) => connection = None,
                Err(error) => {
                    tracing::error!("vhost-user: closing the connection: {error}");
                    connection = None;
                }
            }
        } else if ready.config {
            shared.config_change.clear();
        }
        // Handled even if the front-end has sent more, which waits in the socket.
        if ready.handover {
            match attend(shared, listener, connection.as_mut()) {
                Ok(Attended::GoesOn) => {}
                Ok(Attended::Gone) => {
                    connection.iter_mut().for_each(|open| open.is_gone = true);
                    return wait_for_stop(shared);
                }
                Err(problem) => {
                    tracing::error!("vhost-user: closing the connection: {problem}");
                    connection = None;
                }
            }
        }
        pause_accept = false;
        // Accept only when everything from the present front-end has been handled, including its
        // disconnection: the next front-end may already be waiting.
        if ready.listener && idle {
            pause_accept = !accept(shared, listener, &mut connection)?;
        }
    }
}

fn wait_for_stop(shared: &Shared) -> io::Result<()> {
    let mut fds = [PollFd::new(&shared.stop, PollFlags::IN)];
    loop {
        match poll(&mut fds, None) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Result of poll(2).
#[derive(Default)]
struct Ready {
    stop: bool,
    config: bool,
    handover: bool,
    listener: bool,
    socket: bool,
    alarm: bool,
    back_channel: bool,
}

fn wait(
    shared: &Shared,
    listener: &Listener,
    connection: Option<&Connection<'_>>,
    pause_accept: bool,
) -> io::Result<Ready> {
    let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    // Until the present front-end has sent something or timed out, other front-ends wait in the
    // listener's queue.
    let on_trial = connection.is_some_and(Connection::is_on_trial);
    let accept = match pause_accept || on_trial {
        true => PollFlags::empty(),
        false => PollFlags::IN,
    };
    let mut fds = vec![
        input(shared.stop.as_fd()),
        input(shared.config_change.as_fd()),
        input(shared.handover.as_fd()),
        PollFd::from_borrowed_fd(listener.as_fd(), accept),
    ];
    if let Some(open) = connection {
        fds.push(input(open.socket.as_fd()));
        fds.push(input(open.session.alarm().event()));
        fds.extend(open.session.back_channel().map(input));
    }
    let patience = connection.and_then(Connection::patience);
    let patience = patience.and_then(|time| Timespec::try_from(time).ok());
    let pause = pause_accept.then_some(ACCEPT_PAUSE);
    let timeout = patience.into_iter().chain(pause).min();
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => {}
        Err(Errno::INTR) => return Ok(Ready::default()),
        Err(e) => return Err(e.into()),
    }
    let is_ready = |i: usize| fds.get(i).is_some_and(|fd| !fd.revents().is_empty());
    Ok(Ready {
        stop: is_ready(0),
        config: is_ready(1),
        handover: is_ready(2),
        listener: is_ready(3),
        socket: is_ready(4),
        alarm: is_ready(5),
        back_channel: is_ready(6),
    })
}

/// Accepts a front-end, or refuses it if another one is connected. Returns false if resources are
/// lacking.
fn accept<'a>(
    shared: &'a Shared,
    listener: &Listener,
    connection: &mut Option<Connection<'a>>,
) -> io::Result<bool> {
    let socket: UnixStream = match listener.accept() {
        Ok(socket) => socket.into(),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(true),
        Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
            tracing::error!(
                "vhost-user: cannot accept a connection, so front-ends wait: {}",
                cause(e)
            );
            return Ok(false);
        }
        Err(e) => return Err(e.into()),
    };
    let pid = peer_pid(&socket);
    if connection.as_ref().is_some_and(Connection::is_silent) {
        tracing::warn!(
            "vhost-user: a front-end that sent nothing is disconnected to admit another"
        );
        *connection = None;
    }
    if connection.is_some() {
        tracing::warn!(
            "vhost-user: refused a second front-end (process {pid}), because a disk has at most \
             one"
        );
        return Ok(true);
    }
    tracing::info!("vhost-user: front-end connected (process {pid})");
    delay(shared);
    match Connection::new(shared, socket) {
        Ok(new) => *connection = Some(new),
        Err(e) => tracing::error!(
            "vhost-user: cannot start a session, so the connection is closed: {}",
            cause(e)
        ),
    }
    Ok(true)
}

/// Waits for the disk's connect delay, unless serving must end.
fn delay(shared: &Shared) {
    let delay = shared.disk.connect_delay();
    if !delay.is_zero() {
        let delay = Timespec::try_from(delay).expect("a day at most");
        // `wait` handles a stop request, which ends the delay early.
        let _ = poll(
            &mut [PollFd::new(&shared.stop, PollFlags::IN)],
            Some(&delay),
        );
    }
}

fn peer_pid(socket: &UnixStream) -> i32 {
    socket_peercred(socket).map_or(0, |cred| cred.pid.as_raw_pid())
}

/// The connection of one front-end.
pub struct Connection<'a> {
    pid: i32,
    socket: UnixStream,
    receiver: Receiver,
    pub(super) session: Session<'a>,
    shared: &'a Shared,
    owes: Owes,
    /// Another export has taken over the session.
    pub(super) is_gone: bool,
}

/// The data that a front-end still has to send, and since when.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owes {
    Nothing,
    /// The first message. QEMU may need time, since it connects before the guest's device is
    /// plugged in; another program may never send anything.
    First(Instant),
    /// The rest of a message.
    Rest(Instant),
}

pub enum Progress {
    Idle,
    More,
    Closed,
}

/// Why this side closes a connection.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error("{0}")]
    Message(String),
    #[error("an incomplete message for {0:?}")]
    Unfinished(Duration),
    #[error(
        "no access to memory that the front-end shares: the memory was truncated, or the machine \
         has run out of huge pages"
    )]
    Truncated,
}

impl<'a> Connection<'a> {
    pub fn new(shared: &'a Shared, socket: UnixStream) -> io::Result<Connection<'a>> {
        let connection = Connection::open(shared, socket)?;
        shared.tell(Visit::Attached, connection.pid);
        Ok(connection)
    }

    fn open(shared: &'a Shared, socket: UnixStream) -> io::Result<Connection<'a>> {
        let pid = peer_pid(&socket);
        let session = Session::new(shared, pid)?;
        shared.update_status(|status| status.peer_pid = Some(pid));
        Ok(Connection {
            pid,
            socket,
            receiver: Receiver::default(),
            session,
            shared,
            owes: Owes::First(Instant::now()),
            is_gone: false,
        })
    }

    /// Describes the connection for a successor. The error is for the user.
    pub(super) fn describe(
        &self,
        descriptors: &mut Descriptors,
    ) -> Result<ConnectionState, String> {
        let failed = |error| format!("cannot duplicate a file descriptor: {}", cause(error));
        Ok(ConnectionState {
            socket: descriptors.add(&self.socket).map_err(failed)?,
            spoke: self.owes == Owes::Nothing,
            session: self.session.describe(descriptors)?,
            unfinished: UnfinishedState::of(&self.receiver, descriptors).map_err(failed)?,
        })
    }

    /// Takes over a predecessor's connection. None of its queues run yet.
    pub(super) fn adopt(
        shared: &'a Shared,
        state: ConnectionState,
        descriptors: &mut Descriptors,
    ) -> Result<Connection<'a>, String> {
        let socket = descriptors.take(state.socket)?.into();
        let connection = Connection::open(shared, socket);
        let mut connection =
            connection.map_err(|error| format!("cannot start the session: {}", cause(error)))?;
        // Until the queues run here, the front-end is attached to the predecessor.
        connection.is_gone = true;
        if state.spoke {
            connection.owes = Owes::Nothing;
        }
        if let Some(message) = state.unfinished {
            connection.receiver = message.resume(descriptors)?;
            connection.owes = Owes::Rest(Instant::now());
        }
        connection.session.adopt(state.session, descriptors)?;
        Ok(connection)
    }

    /// Returns true if the front-end has sent nothing for the whole timeout.
    fn is_silent(&self) -> bool {
        matches!(self.owes, Owes::First(since) if since.elapsed() >= self.shared.patience)
    }

    /// Returns true if the front-end has sent nothing, but may still do so in time.
    fn is_on_trial(&self) -> bool {
        matches!(self.owes, Owes::First(_)) && !self.is_silent()
    }

    /// Returns the time left for what the front-end has to send.
    fn patience(&self) -> Option<Duration> {
        match self.owes {
            Owes::Nothing => None,
            Owes::First(_) if self.is_silent() => None,
            Owes::First(since) | Owes::Rest(since) => {
                Some(self.shared.patience.saturating_sub(since.elapsed()))
            }
        }
    }

    fn turn(&mut self, ready: &Ready) -> Result<Progress, CloseError> {
        if ready.alarm || self.session.alarm().is_raised() {
            return Err(CloseError::Truncated);
        }
        if ready.config {
            self.shared.config_change.clear();
            self.session.config_changed();
        }
        if ready.back_channel {
            self.session.read_back_channel();
        }
        if !ready.socket && !ready.listener && self.owes == Owes::Nothing {
            return Ok(Progress::Idle);
        }
        self.handle_messages()
    }

    /// Handles the messages that have arrived.
    pub fn handle_messages(&mut self) -> Result<Progress, CloseError> {
        for _ in 0..BATCH {
            match self.receiver.receive(&self.socket)? {
                Received::Frame(frame) => {
                    self.owes = Owes::Nothing;
                    self.handle(frame)?;
                }
                Received::Incomplete => return self.wait_for_more(),
                Received::Closed => {
                    tracing::info!("vhost-user: front-end disconnected");
                    return Ok(Progress::Closed);
                }
            }
        }
        Ok(Progress::More)
    }

    /// Updates the timeout of an incomplete message, after all received bytes have been handled.
    fn wait_for_more(&mut self) -> Result<Progress, CloseError> {
        match self.owes {
            _ if self.receiver.is_idle() => {}
            Owes::Rest(since) if since.elapsed() >= self.shared.patience => {
                return Err(CloseError::Unfinished(self.shared.patience));
            }
            Owes::Rest(_) => {}
            _ => self.owes = Owes::Rest(Instant::now()),
        }
        Ok(Progress::Idle)
    }

    /// Handles one message and sends the reply that it asks for.
    fn handle(&mut self, frame: Frame) -> Result<(), CloseError> {
        let header = frame.header;
        let outcome = self.session.handle(frame);
        // Checked after handling, since the message may itself negotiate acknowledgements.
        let acks = self.session.acknowledges(header);
        match outcome {
            Ok(Reply::Ack) if acks => self.acknowledge(header, true),
            Ok(Reply::Ack) => Ok(()),
            Ok(Reply::Payload(payload, fd)) => {
                debug_assert!(payload.len() <= MAX_PAYLOAD);
                let reply = Header::reply(header.request, payload.len());
                let fd = fd.as_ref().map(AsFd::as_fd);
                Ok(send(&self.socket, reply, &payload, fd)?)
            }
            Err(Fault::Refused(problem)) if acks => {
                tracing::warn!("vhost-user: refused {}: {problem}", name(header.request));
                self.acknowledge(header, false)
            }
            Err(Fault::Refused(problem) | Fault::Fatal(problem)) => {
                if acks {
                    // The connection is closed in any case.
                    let _ = self.acknowledge(header, false);
                }
                let name = name(header.request);
                Err(CloseError::Message(format!("{name}: {problem}")))
            }
        }
    }

    /// Sends an acknowledgement (vhost-user, REPLY_ACK): 0 means success.
    fn acknowledge(&self, request: Header, success: bool) -> Result<(), CloseError> {
        let value = u64::from(!success).to_ne_bytes();
        let reply = Header::reply(request.request, value.len());
        Ok(send(&self.socket, reply, &value, None)?)
    }
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        self.session.end();
        self.shared.update_status(|status| {
            status.peer_pid = None;
            status.keeps_nothing = false;
        });
        if !self.is_gone {
            self.shared.tell(Visit::Detached, self.pid);
        }
    }
}
