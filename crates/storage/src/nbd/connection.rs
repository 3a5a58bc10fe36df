//! A connection of a channel: its commands in flight, and its sends and receives.

use super::endpoint::{Connected, say_goodbye};
use super::receiver::Receiver;
use super::sender::Sender;
use super::table::Table;
use super::tls_connection::TlsConnection;
use fathom_core::{Cx, SocketIo, SocketIoKind, Token};
use fathom_nbd::protocol::Replies;
use fathom_units::cause;
use libc::msghdr;
use rustix::net::{Shutdown, shutdown};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Tag of [`Event::Notified`], far from those of the connections; layers have greater ones.
const NOTIFIED: u16 = 1000;

/// Events that complete with [`RequestId::NOBODY`](fathom_core::RequestId::NOBODY).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A receive or a send of the connection with this index has completed.
    Received(usize),
    Sent(usize),
    /// The channel's notifier was signalled.
    Notified,
}

impl Event {
    pub(super) fn tag(self) -> u16 {
        match self {
            Event::Received(index) => 2 * index as u16,
            Event::Sent(index) => 2 * index as u16 + 1,
            Event::Notified => NOTIFIED,
        }
    }

    pub(super) fn of(tag: u16) -> Event {
        match tag {
            NOTIFIED => Event::Notified,
            tag if tag.is_multiple_of(2) => Event::Received(usize::from(tag / 2)),
            tag => Event::Sent(usize::from(tag / 2)),
        }
    }
}

/// A connection. The engine may be using memory of its parts, so it is dropped only when nothing is
/// in flight.
pub(super) struct Connection {
    /// None once the connection has ended.
    socket: Option<OwnedFd>,
    pub(super) table: Table,
    pub(super) sender: Sender,
    receiver: Receiver,
    tls: Option<Box<TlsConnection>>,
    sending: bool,
    /// Start of the send in flight, in ticks.
    since: u64,
    receiving: bool,
}

impl Connection {
    /// Makes a connection with the negotiated properties.
    pub(super) fn new(connected: Connected, replies: Replies) -> Connection {
        let Connected {
            socket,
            tls,
            context,
        } = connected;
        Connection {
            table: Table::new(replies, RandomState::new().hash_one(())),
            sender: Sender::new(),
            receiver: Receiver::new(replies, context),
            socket: Some(socket),
            tls: tls.map(TlsConnection::new),
            sending: false,
            since: 0,
            receiving: false,
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("it has not ended").as_fd()
    }

    pub(super) fn open(&self, cx: &mut Cx) -> io::Result<()> {
        cx.engine.add_socket(self.socket())
    }

    /// Unregisters the socket, on which no operation may be in flight.
    pub(super) fn forget(&self, cx: &mut Cx) {
        cx.engine.remove_socket(self.socket());
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.sending || self.receiving
    }

    /// Starts a send if none is in flight and commands wait. Commands that need nothing more of
    /// their requests are appended to `gone`.
    pub(super) fn send(
        &mut self,
        cx: &mut Cx,
        index: usize,
        gone: &mut Vec<u16>,
    ) -> Result<(), String> {
        if self.sending {
            return Ok(());
        }
        let (sender, table) = (&mut self.sender, &mut self.table);
        let message = match &mut self.tls {
            None => sender.prepare(table, &cx.slab),
            Some(tls) => tls.prepare(sender, table, &cx.slab, gone)?,
        };
        if let Some(message) = message {
            self.sending = true;
            self.since = cx.now();
            self.push(cx, SocketIoKind::Send, message, Event::Sent(index));
        }
        Ok(())
    }

    pub(super) fn receive(&mut self, cx: &mut Cx, index: usize) {
        if self.receiving {
            return;
        }
        let message = match &mut self.tls {
            None => Some(self.receiver.prepare(&self.table, &cx.slab)),
            Some(tls) => tls.room(),
        };
        if let Some(message) = message {
            self.receiving = true;
            self.push(cx, SocketIoKind::Receive, message, Event::Received(index));
        }
    }

    fn push(&self, cx: &mut Cx, kind: SocketIoKind, message: *mut msghdr, event: Event) {
        let io = SocketIo {
            kind,
            socket: self.socket().as_raw_fd(),
            message,
        };
        // SAFETY: the connection lives until the completion, or is leaked, and so do the requests.
        // No request completes while it is in a send, or before its reply was received, unless the
        // socket is closed and nothing is in flight.
        unsafe { cx.engine.push_socket(io, Token::channel(event.tag())) };
    }

    /// Handles the result of a receive. Commands whose replies are complete are appended to
    /// `answered`.
    pub(super) fn received(
        &mut self,
        cx: &Cx,
        result: i32,
        answered: &mut Vec<u16>,
    ) -> Result<(), String> {
        self.receiving = false;
        let bytes = match result {
            ..0 => return Err(cause(io::Error::from_raw_os_error(-result))),
            0 => return Err("the server closed the connection".into()),
            bytes => bytes as usize,
        };
        let (receiver, table, now) = (&mut self.receiver, &mut self.table, cx.now());
        match &mut self.tls {
            None => {
                receiver.received(bytes);
                let taken = receiver.take_in(table, &cx.slab, now, answered);
                taken.map_err(|violation| format!("the server {violation}"))
            }
            Some(tls) => tls.received(bytes, receiver, table, &cx.slab, now, answered),
        }
    }

    /// Handles the result of a send. Commands that need nothing more of their requests are appended
    /// to `gone`.
    pub(super) fn sent(&mut self, result: i32, gone: &mut Vec<u16>) -> Result<(), String> {
        self.sending = false;
        if result <= 0 {
            return Err(cause(io::Error::from_raw_os_error(-result)));
        }
        match &mut self.tls {
            None => self.sender.sent(result as usize, gone),
            Some(tls) => tls.sent(result as usize),
        }
        Ok(())
    }

    /// Records the end of an operation after the connection was closed.
    pub(super) fn settles(&mut self, event: Event) {
        match event {
            Event::Sent(_) => self.sending = false,
            _ => self.receiving = false,
        }
    }

    /// Shuts the connection down and cancels its operations.
    pub(super) fn close(&self, cx: &mut Cx, index: usize) {
        let _ = shutdown(self.socket(), Shutdown::Both);
        for (in_flight, event) in [
            (self.receiving, Event::Received(index)),
            (self.sending, Event::Sent(index)),
        ] {
            if in_flight {
                cx.engine.cancel_socket(Token::channel(event.tag()));
            }
        }
    }

    /// Returns what is wrong if the server has not responded, or not read, since that time.
    pub(super) fn complaint(&self, since: u64) -> Option<&'static str> {
        if self.table.has_stale(since) {
            Some("the server no longer responds")
        } else if self.sending && self.since < since {
            Some("the server no longer reads requests")
        } else {
            None
        }
    }

    /// Ends the connection. `politely`: sends NBD_CMD_DISC if no command was sent partly.
    pub(super) fn end(mut self, replies: Replies, politely: bool) {
        if politely && !self.sending && self.sender.is_between_commands() {
            let socket = self.socket.as_ref().expect("it has not ended");
            let tls = self.tls.as_mut().map(|tls| tls.session());
            say_goodbye(socket, tls, replies);
        }
        let _ = shutdown(self.socket(), Shutdown::Both);
        if self.is_in_use() {
            // The kernel may still be using the other parts.
            drop(self.socket.take());
            std::mem::forget(self);
        }
    }
}
