//! A worker's access to the export.

use super::connection::{Connection, Event};
use super::links::{Given, Seat};
use super::recovery::look_for;
use super::requests::Progress;
use super::shared::Shared;
use super::unflushed::Unflushed;
use fathom_core::{Channel, Cx, Extents, Op, Request, RequestId, Stage, Status, Token};
use fathom_nbd::protocol::export_flag;
use fathom_units::cause;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// State of the channel's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Up,
    /// The connections are lost; the engine may still be using them.
    Closing,
    /// The channel has no connections; the notifier announces new ones.
    Down,
}

pub(super) struct NbdChannel {
    pub(super) shared: Arc<Shared>,
    seat: Seat,
    pub(super) phase: Phase,
    /// Generation of the connections.
    generation: u64,
    pub(super) connections: Vec<Connection>,
    /// Requests that have not been sent completely as commands.
    pub(super) waiting: VecDeque<RequestId>,
    /// Progress by request.
    pub(super) progress: Vec<Progress>,
    pub(super) unflushed: Unflushed,
    /// Completed writes that wait for room among the writes kept until a flush.
    pub(super) held: VecDeque<RequestId>,
    /// Number of the channel's own flush in flight, which no request has asked for.
    pub(super) own_flush: Option<u64>,
    /// Whether the channel must begin a flush of its own.
    pub(super) flush_is_wanted: bool,
    /// Reason to abandon the connections.
    pub(super) trouble: Option<String>,
    /// Time, in ticks, that the server may take to reply to a request.
    timeout: Option<u64>,
    /// Time, in ticks, for which requests wait for a disconnected server.
    pub(super) patience: u64,
    /// Whether the timer that looks for overdue replies is set.
    alarmed: bool,
    /// Scratch list of commands that have been answered or sent.
    ended: Vec<u16>,
}

impl NbdChannel {
    pub(super) fn new(
        shared: Arc<Shared>,
        seat: Seat,
        given: Option<Given>,
        cx: &mut Cx,
    ) -> io::Result<NbdChannel> {
        let ticks = |time| cx.clock().ticks(time);
        let mut channel = NbdChannel {
            seat,
            phase: Phase::Down,
            generation: 0,
            connections: Vec::new(),
            waiting: VecDeque::new(),
            progress: Vec::new(),
            unflushed: Unflushed::default(),
            held: VecDeque::new(),
            own_flush: None,
            flush_is_wanted: false,
            trouble: None,
            timeout: shared.options.timeout.map(|time| ticks(time).max(1)),
            patience: match shared.is_halted() {
                true => 0,
                false => ticks(shared.options.reconnect.unwrap_or_default()),
            },
            alarmed: false,
            ended: Vec::new(),
            shared,
        };
        // If this constructor fails, the caller must give up the seat.
        let notified = Token::channel(Event::Notified.tag());
        cx.engine
            .watch(channel.seat.notifier.as_raw_fd(), notified)?;
        if let Some(given) = given {
            channel.adopt(cx, given)?;
        }
        Ok(channel)
    }

    /// Adopts new connections.
    fn adopt(&mut self, cx: &mut Cx, given: Given) -> io::Result<()> {
        let replies = self.shared.export.replies;
        self.generation = given.generation;
        for connected in given.connections {
            let connection = Connection::new(connected, replies);
            connection.open(cx)?;
            self.connections.push(connection);
        }
        self.phase = Phase::Up;
        Ok(())
    }

    /// Returns the errno, or 0, with which to complete the request without the server. None: the
    /// server must be asked.
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

    /// Makes all progress that is possible without waiting.
    pub(super) fn go_on(&mut self, cx: &mut Cx) {
        if self.phase == Phase::Up {
            if let Err(why) = self.ask_and_send(cx) {
                return self.lose(cx, &why);
            }
            for (index, connection) in self.connections.iter_mut().enumerate() {
                connection.receive(cx, index);
            }
        }
        self.set_alarm(cx);
    }

    /// Sends commands until no request waits or there is no room: commands may end while they are
    /// sent.
    fn ask_and_send(&mut self, cx: &mut Cx) -> Result<(), String> {
        loop {
            self.ask(cx);
            self.send(cx)?;
            if let Some(why) = self.trouble.take() {
                return Err(why);
            }
            if self.waiting.is_empty() || self.least_used().is_none() {
                return Ok(());
            }
        }
    }

    fn send(&mut self, cx: &mut Cx) -> Result<(), String> {
        for index in 0..self.connections.len() {
            let mut gone = std::mem::take(&mut self.ended);
            let sent = self.connections[index].send(cx, index, &mut gone);
            self.have_gone(cx, index, gone);
            sent?;
        }
        Ok(())
    }

    fn received(&mut self, cx: &mut Cx, index: usize, result: i32) {
        let mut answered = std::mem::take(&mut self.ended);
        let outcome = self.connections[index].received(cx, result, &mut answered);
        for command in answered.drain(..) {
            if !self.connections[index].table.get(command).in_send {
                self.command_done(cx, index, command);
            }
        }
        self.ended = answered;
        match outcome {
            Ok(()) => self.go_on(cx),
            Err(why) => self.lose(cx, &why),
        }
    }

    fn sent(&mut self, cx: &mut Cx, index: usize, result: i32) {
        let mut gone = std::mem::take(&mut self.ended);
        let outcome = self.connections[index].sent(result, &mut gone);
        self.have_gone(cx, index, gone);
        match outcome {
            Ok(()) => self.go_on(cx),
            Err(why) => self.lose(cx, &why),
        }
    }

    /// Handles commands that have been sent completely.
    fn have_gone(&mut self, cx: &mut Cx, index: usize, mut gone: Vec<u16>) {
        for number in gone.drain(..) {
            let command = self.connections[index].table.get(number);
            command.in_send = false;
            command.touched = cx.now();
            // The server may answer before it has received the whole command.
            if command.answered {
                self.command_done(cx, index, number);
            }
        }
        self.ended = gone;
    }

    /// Abandons the connections of this and all other channels. Once the engine has released the
    /// memory of requests in flight, these wait for the next connections.
    pub(super) fn lose(&mut self, cx: &mut Cx, why: &str) {
        self.shared.lose(self.generation, why);
        self.close(cx);
    }

    fn close(&mut self, cx: &mut Cx) {
        if self.phase != Phase::Up {
            return;
        }
        self.phase = Phase::Closing;
        self.trouble = None;
        for (index, connection) in self.connections.iter().enumerate() {
            connection.close(cx, index);
        }
        self.settle(cx);
    }

    /// Completes the loss of the connections once nothing is in flight.
    fn settle(&mut self, cx: &mut Cx) {
        if self
            .connections
            .iter()
            .any(|connection| connection.is_in_use())
        {
            return;
        }
        self.take_back(cx);
        for connection in self.connections.drain(..) {
            connection.forget(cx);
        }
        self.phase = Phase::Down;
        self.let_go(false);
        self.give_up(cx);
        self.set_alarm(cx);
    }

    fn let_go(&mut self, leaves: bool) {
        let log = std::mem::take(&mut self.unflushed);
        let was_last = self.shared.let_go(&self.seat, log, leaves);
        if was_last && self.shared.is_sought() {
            look_for(&self.shared);
        }
    }

    fn notified(&mut self, cx: &mut Cx) {
        if self.shared.is_halted() {
            self.patience = 0;
            if self.phase == Phase::Down {
                return self.give_up(cx);
            }
        }
        if self.phase == Phase::Up {
            if !self.shared.is_current(self.generation) {
                self.close(cx);
            } else if self.shared.takes_flush() {
                self.flush_is_wanted = true;
                return self.go_on(cx);
            }
        }
        if self.phase != Phase::Down {
            return;
        }
        let Some(given) = self.shared.fetch(&self.seat) else {
            return;
        };
        match self.adopt(cx, given) {
            Ok(()) => {
                self.flush_is_wanted = self.shared.takes_flush();
                self.go_on(cx);
            }
            Err(error) => {
                self.phase = Phase::Up;
                self.lose(cx, &cause(error));
            }
        }
    }

    /// Sets the timer that looks for overdue replies, or fails requests that have waited too long.
    fn set_alarm(&mut self, cx: &mut Cx) {
        match (self.phase, self.timeout) {
            (Phase::Up, Some(timeout)) if !self.alarmed => {
                let is_used = |connection: &Connection| connection.table.used() > 0;
                if self.connections.iter().any(is_used) {
                    self.alarmed = true;
                    cx.wake_at(cx.now() + timeout / 4 + 1);
                }
            }
            (Phase::Up, _) => {}
            _ => {
                if let Some(oldest) = self.oldest_waiting() {
                    cx.wake_at(oldest.saturating_add(self.patience).saturating_add(1));
                }
            }
        }
    }

    /// Fails requests that have waited long enough for a disconnected server, or may not wait.
    fn give_up(&mut self, cx: &mut Cx) {
        let patience = self.patience;
        self.fail_waiting(cx, |cx, progress, id| {
            let waited = progress.lost_at.map_or(0, |since| cx.now() - since);
            waited >= patience || !cx.may_wait(id)
        });
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
        if request.op == Op::BlockStatus && self.shared.export.context.is_none() {
            // SAFETY: the request is in flight.
            unsafe { Extents::of(&request.segments, request.len) }.push(Status::DATA, request.len);
            return cx.complete(id, 0);
        }
        if self.phase != Phase::Up && (self.patience == 0 || !cx.may_wait(id)) {
            return cx.complete(id, libc::EIO);
        }
        self.begin(cx, id);
        self.go_on(cx);
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        debug_assert_eq!(id, RequestId::NOBODY);
        match Event::of(tag) {
            Event::Notified => self.notified(cx),
            event if self.phase == Phase::Closing => {
                let (Event::Received(index) | Event::Sent(index)) = event else {
                    return;
                };
                self.connections[index].settles(event);
                self.settle(cx);
            }
            Event::Received(index) => self.received(cx, index, result),
            Event::Sent(index) => self.sent(cx, index, result),
        }
    }

    fn timer(&mut self, cx: &mut Cx) {
        self.alarmed = false;
        if self.phase == Phase::Up {
            let timeout = self.timeout.unwrap_or(u64::MAX);
            let since = cx.now().saturating_sub(timeout);
            let mut complaints = self.connections.iter().map(|one| one.complaint(since));
            if let Some(why) = complaints.find_map(|complaint| complaint) {
                return self.lose(cx, why);
            }
        } else if self.phase == Phase::Down {
            self.give_up(cx);
        }
        self.set_alarm(cx);
    }

    fn drain(&mut self, cx: &mut Cx, _source: u16) {
        if self.phase == Phase::Down {
            self.give_up(cx);
        }
    }
}

impl Drop for NbdChannel {
    fn drop(&mut self) {
        let replies = self.shared.export.replies;
        let is_up = self.phase == Phase::Up;
        let connections = self.connections.drain(..);
        connections.for_each(|connection| connection.end(replies, is_up));
        self.let_go(true);
    }
}
