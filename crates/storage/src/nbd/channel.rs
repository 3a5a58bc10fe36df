//! One worker's way to the export.

use super::link::{Attempt, Phase};
use super::receiver::Receiver;
use super::requests::Progress;
use super::sender::Sender;
use super::shared::{Connected, Mark, Shared, say_goodbye};
use super::table::Table;
use fathom_core::{
    Channel, Cx, Extents, Op, Request, RequestId, SocketIo, SocketIoKind, Stage, Status, Token,
};
use fathom_nbd::protocol::export_flag;
use rustix::net::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

/// What completes with [`RequestId::NOBODY`].
pub(super) const RECEIVE: u16 = 0;
pub(super) const SEND: u16 = 1;
/// An attempt to connect has ended.
pub(super) const WOKEN: u16 = 2;

/// What the engine may be using, and so goes only when it does not.
pub(super) struct Line {
    pub(super) table: Table,
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
}

impl Line {
    fn new() -> Box<Line> {
        Box::new(Line {
            table: Table::new(),
            sender: Sender::new(),
            receiver: Receiver::new(),
        })
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.sender.in_flight || self.receiver.in_flight
    }
}

pub(super) struct NbdChannel {
    pub(super) shared: Arc<Shared>,
    pub(super) phase: Phase,
    /// While there is a connection, a closing one too.
    pub(super) socket: Option<OwnedFd>,
    pub(super) line: Box<Line>,
    /// Requests of which the server has not been asked everything.
    pub(super) waiting: VecDeque<RequestId>,
    /// By request.
    pub(super) progress: Vec<Progress>,
    pub(super) attempt: Arc<Attempt>,
    pub(super) mark: Mark,
    /// The time-out in ticks.
    pub(super) timeout: Option<u64>,
    /// Whether the alarm is set by which overdue answers are looked for.
    pub(super) alarmed: bool,
    /// Commands whose answer has come, or that have been sent.
    pub(super) ended: Vec<u16>,
}

impl NbdChannel {
    pub(super) fn new(
        shared: Arc<Shared>,
        connected: Connected,
        cx: &mut Cx,
    ) -> io::Result<NbdChannel> {
        let attempt = Arc::new(Attempt::new()?);
        cx.engine.watch(attempt.fd(), Token::channel(WOKEN))?;
        let timeout = shared.options.timeout;
        let mut channel = NbdChannel {
            phase: Phase::Down { retry_at: 0 },
            socket: None,
            line: Line::new(),
            waiting: VecDeque::new(),
            progress: Vec::new(),
            attempt,
            mark: shared.new_mark(),
            timeout: timeout.map(|timeout| cx.clock().ticks(timeout).max(1)),
            alarmed: false,
            ended: Vec::new(),
            shared,
        };
        channel.adopt(cx, connected)?;
        Ok(channel)
    }

    /// Why the request cannot be asked of the server, or what it is answered
    /// without.
    #[inline]
    fn answer_at_once(&self, request: &Request) -> Option<i32> {
        let shared = &*self.shared;
        let (at, len) = (request.at, request.len);
        let size = shared.size();
        if at > size || len > size - at {
            return Some(libc::EIO);
        }
        let has = |flag| shared.export.has(flag);
        let refused = match request.op {
            Op::Read => None,
            Op::Flush if shared.flush_has_failed() => Some(libc::EIO),
            Op::Flush => (!has(export_flag::SEND_FLUSH)).then_some(0),
            Op::BlockStatus => None,
            _ if shared.options.read_only => Some(libc::EROFS),
            Op::Write => None,
            Op::Discard => (!has(export_flag::SEND_TRIM)).then_some(libc::EOPNOTSUPP),
            Op::WriteZeroes => (!has(export_flag::SEND_WRITE_ZEROES)).then_some(libc::EOPNOTSUPP),
        };
        let unit = u64::from(shared.export.minimum_block) - 1;
        match refused {
            None if (at | len) & unit != 0 => Some(libc::EINVAL),
            None if len == 0 && request.op != Op::Flush => Some(0),
            refused => refused,
        }
    }

    /// Move everything as far as it goes without waiting.
    pub(super) fn go_on(&mut self, cx: &mut Cx) {
        match self.phase {
            Phase::Up => {
                self.ask(cx);
                self.send(cx);
                self.receive(cx);
                self.set_alarm(cx);
            }
            Phase::Down { retry_at } if !self.waiting.is_empty() => self.reconnect(cx, retry_at),
            Phase::Down { .. } | Phase::Closing | Phase::Connecting => {}
        }
    }

    fn send(&mut self, cx: &mut Cx) {
        let Line { table, sender, .. } = &mut *self.line;
        let Some(socket) = self.socket.as_ref().filter(|_| !sender.in_flight) else {
            return;
        };
        if let Some(message) = sender.prepare(table, &cx.slab) {
            let io = SocketIo {
                kind: SocketIoKind::Send,
                socket: socket.as_raw_fd(),
                message,
            };
            sender.in_flight = true;
            sender.since = cx.now();
            // SAFETY: the line stays until the completion, or for good, and
            // so do the requests: none is completed while it is in a send.
            unsafe { cx.engine.push_socket(io, Token::channel(SEND)) };
        }
    }

    fn receive(&mut self, cx: &mut Cx) {
        let Line {
            table, receiver, ..
        } = &mut *self.line;
        let Some(socket) = self.socket.as_ref().filter(|_| !receiver.in_flight) else {
            return;
        };
        let io = SocketIo {
            kind: SocketIoKind::Receive,
            socket: socket.as_raw_fd(),
            message: receiver.prepare(table, &cx.slab),
        };
        receiver.in_flight = true;
        // SAFETY: likewise; a request is completed when its answer has been
        // received, or when the socket is closed and nothing is in flight.
        unsafe { cx.engine.push_socket(io, Token::channel(RECEIVE)) };
    }

    fn received(&mut self, cx: &mut Cx, result: i32) {
        self.line.receiver.in_flight = false;
        if self.phase != Phase::Up {
            return self.settle(cx);
        }
        let now = cx.now();
        let Line {
            table, receiver, ..
        } = &mut *self.line;
        let outcome = match result {
            ..0 => Err(io::Error::from_raw_os_error(-result).to_string()),
            0 => Err("the server closed the connection".into()),
            bytes => {
                receiver.received(bytes as usize);
                let taken = receiver.take_in(table, &cx.slab, now, &mut self.ended);
                taken.map_err(|violation| format!("the server {violation}"))
            }
        };
        let mut ended = std::mem::take(&mut self.ended);
        for index in ended.drain(..) {
            if !self.line.table.get(index).in_send {
                self.command_done(cx, index);
            }
        }
        self.ended = ended;
        match outcome {
            Ok(()) => self.go_on(cx),
            Err(why) => self.lose(cx, &why),
        }
    }

    fn sent(&mut self, cx: &mut Cx, result: i32) {
        self.line.sender.in_flight = false;
        if self.phase != Phase::Up {
            return self.settle(cx);
        }
        if result <= 0 {
            let why = io::Error::from_raw_os_error(-result);
            return self.lose(cx, &why.to_string());
        }
        let mut gone = std::mem::take(&mut self.ended);
        self.line.sender.sent(result as usize, &mut gone);
        for index in gone.drain(..) {
            let command = self.line.table.get(index);
            command.in_send = false;
            command.touched = cx.now();
            // The server need not have waited for all of it.
            if command.answered {
                self.command_done(cx, index);
            }
        }
        self.ended = gone;
        self.go_on(cx);
    }

    /// Have overdue answers looked for while there are any to come.
    fn set_alarm(&mut self, cx: &mut Cx) {
        let Some(timeout) = self.timeout.filter(|_| !self.alarmed) else {
            return;
        };
        if self.line.table.used() > 0 {
            self.alarmed = true;
            cx.wake_at(cx.now() + timeout / 4 + 1);
        }
    }
}

impl Channel for NbdChannel {
    #[inline]
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        let request = &cx.slab[id];
        if let Some(errno) = self.answer_at_once(request) {
            return cx.complete(id, errno);
        }
        if request.op == Op::BlockStatus && self.shared.export.allocation.is_none() {
            // SAFETY: the request is in flight.
            unsafe { Extents::of(&request.segments, request.len) }.push(Status::DATA, request.len);
            return cx.complete(id, 0);
        }
        let is_up = self.phase == Phase::Up;
        if !is_up && !cx.may_wait(id) {
            return cx.complete(id, libc::EIO);
        }
        self.begin(cx, id);
        self.go_on(cx);
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        debug_assert_eq!(id, RequestId::NOBODY);
        match tag {
            RECEIVE => self.received(cx, result),
            SEND => self.sent(cx, result),
            WOKEN => self.connected(cx),
            _ => {}
        }
    }

    fn timer(&mut self, cx: &mut Cx) {
        self.alarmed = false;
        if self.phase != Phase::Up {
            return;
        }
        let timeout = self.timeout.unwrap_or(u64::MAX);
        let since = cx.now().saturating_sub(timeout);
        let Line { table, sender, .. } = &*self.line;
        if table.has_stale(since) {
            self.lose(cx, "the server does not answer any more");
        } else if sender.in_flight && sender.since < since {
            self.lose(cx, "the server does not read any more");
        } else {
            self.set_alarm(cx);
        }
    }

    fn drain(&mut self, cx: &mut Cx, _source: u16) {
        if self.phase != Phase::Up {
            self.give_up_on_leaving(cx);
        }
    }
}

impl Drop for NbdChannel {
    fn drop(&mut self) {
        if let Some(socket) = &self.socket {
            if self.phase == Phase::Up && self.line.sender.is_between_commands() {
                say_goodbye(socket);
            }
            let _ = shutdown(socket.as_fd(), Shutdown::Both);
        }
        if self.line.is_in_use() {
            // The kernel may still be using it.
            std::mem::forget(std::mem::replace(&mut self.line, Line::new()));
        }
    }
}
