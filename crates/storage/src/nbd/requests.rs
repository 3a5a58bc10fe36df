//! Splits requests into commands, and completes requests from their replies.

use super::channel::{NbdChannel, Phase};
use super::table::Ask;
use super::unflushed::LONGEST;
use crate::file::report::report;
use fathom_core::{Cx, Op, Request, RequestId, Stage};
use fathom_nbd::protocol::{Replies, command, command_flag, export_flag};
use fathom_units::cause;

/// Maximum length in bytes of a trim, and of the write zeroes of one request.
pub(super) const MAX_TRIM: u64 = 1 << 30;

/// Maximum length in bytes of a block status command with 32-bit lengths, in whole blocks.
const MAX_STATUS: u64 = (4 << 30) - (64 << 10);

/// A flush that belongs to no request.
const FLUSH: Ask = Ask {
    id: RequestId::NOBODY,
    flags: 0,
    command: command::FLUSH,
    offset: 0,
    len: 0,
    start: 0,
};

/// Returns whether a write is too long to be kept until a flush, so that it gets a flush of its
/// own.
fn is_long(request: &Request) -> bool {
    request.op == Op::Write && request.len > LONGEST
}

/// Progress of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// Time, in ticks, since when it has waited for a disconnected server.
    pub(super) lost_at: Option<u64>,
    /// Number of bytes for which commands were made.
    asked: u64,
    /// Number of commands that the server has not answered.
    commands: u32,
    /// The first errno of a command, or 0.
    errno: i32,
    /// State of the request's flush: of a flush request, or after another request's commands.
    flush: Flush,
    /// Whether the request is in `waiting`.
    waits: bool,
}

/// State of a request's flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flush {
    /// The request needs no flush.
    #[default]
    None,
    /// The flush follows when all other commands have been answered.
    After,
    /// The flush must be sent.
    Due,
    /// The flush with this number has been sent.
    Asked(u64),
}

impl NbdChannel {
    /// Accepts a request.
    pub(super) fn begin(&mut self, cx: &mut Cx, id: RequestId) {
        let index = id.0 as usize;
        if index >= self.progress.len() {
            let capacity = cx.slab.capacity().max(index + 1);
            self.progress.resize(capacity, Progress::default());
            self.waiting.reserve(capacity);
        }
        self.progress[index] = Progress {
            flush: self.first_flush(cx, id),
            waits: true,
            lost_at: (self.phase != Phase::Up).then(|| cx.now()),
            ..Progress::default()
        };
        cx.slab[id].wire.starts_again();
        self.waiting.push_back(id);
    }

    /// Returns the initial flush state of a request.
    fn first_flush(&self, cx: &Cx, id: RequestId) -> Flush {
        let request = &cx.slab[id];
        let export = &self.shared.export;
        let needs_flush = !export.has(export_flag::SEND_FUA) && self.is_durable(cx, id);
        match request.op {
            Op::Flush => Flush::Due,
            Op::Write | Op::Discard | Op::WriteZeroes
                if export.has_cache() && (needs_flush || is_long(request)) =>
            {
                Flush::After
            }
            _ => Flush::None,
        }
    }

    /// Returns whether the request must be durable when it completes.
    fn is_durable(&self, cx: &Cx, id: RequestId) -> bool {
        let request = &cx.slab[id];
        let writes = matches!(request.op, Op::Write | Op::Discard | Op::WriteZeroes);
        request.fua || writes && self.shared.options.writethrough
    }

    /// Hands commands to the sender, as many as there is room for.
    pub(super) fn ask(&mut self, cx: &mut Cx) {
        while let Some(&id) = self.waiting.front() {
            if self.is_asked(cx, id) {
                self.waiting.pop_front();
                self.progress[id.0 as usize].waits = false;
                self.settle_request(cx, id);
            } else if let Some(index) = self.least_used() {
                let ask = self.next(cx, id);
                cx.enter(id, Stage::Device);
                let cookie = self.put(index, ask);
                cx.slab[id].wire.goes(cookie);
            } else {
                break;
            }
        }
        self.flush_in_time();
    }

    /// Returns the connection with the fewest commands, if it has room for another one.
    #[inline]
    pub(super) fn least_used(&self) -> Option<usize> {
        let all = self.connections.iter().enumerate();
        let (index, least) = all.min_by_key(|(_, connection)| connection.table.used())?;
        (!least.table.is_full()).then_some(index)
    }

    /// Adds a command to a connection. Returns the command's cookie.
    #[inline]
    fn put(&mut self, index: usize, ask: Ask) -> u64 {
        let connection = &mut self.connections[index];
        let command = connection.table.add(ask);
        connection.sender.add(command);
        connection.table.cookie(command)
    }

    /// Begins a flush of the channel's own before the room for kept writes is used up, or when
    /// `flush_is_wanted` is set.
    fn flush_in_time(&mut self) {
        let has_no_room = self.unflushed.is_half_full() || !self.held.is_empty();
        let is_time = has_no_room || self.flush_is_wanted;
        if !is_time || self.own_flush.is_some() {
            return;
        }
        if let Some(index) = self.least_used() {
            self.flush_is_wanted = false;
            self.own_flush = Some(self.shared.flushes.begin());
            self.put(index, FLUSH);
        }
    }

    /// Returns whether all commands of a request have been made, or an error makes further ones
    /// pointless.
    fn is_asked(&self, cx: &Cx, id: RequestId) -> bool {
        let progress = &self.progress[id.0 as usize];
        let (request, asked) = (&cx.slab[id], progress.asked);
        let whole = match request.op {
            Op::Flush => true,
            // A reply may cover only a part of the range.
            Op::BlockStatus => asked > 0,
            _ => asked == request.len,
        };
        progress.errno != 0 || whole && progress.flush != Flush::Due
    }

    /// Makes the next command of a request.
    fn next(&mut self, cx: &Cx, id: RequestId) -> Ask {
        let durable = self.is_durable(cx, id);
        let progress = &mut self.progress[id.0 as usize];
        let (request, export) = (&cx.slab[id], &self.shared.export);
        progress.commands += 1;
        if progress.flush == Flush::Due {
            progress.flush = Flush::Asked(self.shared.flushes.begin());
            return Ask { id, ..FLUSH };
        }
        let payload = u64::from(export.maximum_payload());
        let is_extended = export.replies == Replies::Extended;
        let (command, limit) = match request.op {
            Op::Read => (command::READ, payload),
            Op::Write => (command::WRITE, payload),
            Op::Discard => (command::TRIM, MAX_TRIM),
            // Servers that implement it by writing may limit it like writes.
            Op::WriteZeroes if is_extended => (command::WRITE_ZEROES, MAX_TRIM),
            Op::WriteZeroes => (command::WRITE_ZEROES, payload),
            Op::BlockStatus if is_extended => (command::BLOCK_STATUS, u64::MAX),
            Op::BlockStatus => (command::BLOCK_STATUS, MAX_STATUS),
            Op::Flush => unreachable!("a flush has no other part"),
        };
        let mut flags = 0;
        if durable && export.has(export_flag::SEND_FUA) {
            flags |= command_flag::FUA;
        }
        if request.op == Op::WriteZeroes && !request.unmap {
            flags |= command_flag::NO_HOLE;
        }
        if request.op == Op::Write && is_extended {
            flags |= command_flag::PAYLOAD_LEN;
        }
        let start = progress.asked;
        let len = (request.len - start).min(limit);
        progress.asked += len;
        Ask {
            id,
            flags,
            command,
            offset: request.at + start,
            len,
            start,
        }
    }

    /// Handles a command that the server has answered and the engine has sent.
    pub(super) fn command_done(&mut self, cx: &mut Cx, connection: usize, index: u16) {
        let table = &mut self.connections[connection].table;
        let errno = table.get(index).errno;
        let Ask { id, command, .. } = table.remove(index);
        if id == RequestId::NOBODY {
            return self.own_flush_done(cx, errno);
        }
        if errno != 0 && command == command::FLUSH && cx.slab[id].op != Op::Flush {
            // The guest learns that its write failed, but not that earlier writes may be lost.
            self.flush_failed(errno);
        }
        let progress = &mut self.progress[id.0 as usize];
        progress.commands -= 1;
        if progress.errno == 0 {
            progress.errno = errno;
        }
        self.settle_request(cx, id);
    }

    /// Handles the end of the channel's own flush.
    fn own_flush_done(&mut self, cx: &mut Cx, errno: i32) {
        let Some(number) = self.own_flush.take() else {
            return;
        };
        match errno {
            0 => self.has_flushed(cx, number),
            _ => self.flush_failed(errno),
        }
    }

    /// Handles the failure of a flush that no guest or client has requested.
    ///
    /// The kept writes must be sent again and flushed to find out whether they are lost. Until then
    /// a successful flush proves nothing: the server may have dropped the data of the failed one.
    fn flush_failed(&mut self, errno: i32) {
        self.shared.flushes.distrust();
        let error = std::io::Error::from_raw_os_error(errno);
        self.trouble = Some(format!("the server failed to flush: {}", cause(error)));
    }

    fn has_flushed(&mut self, cx: &mut Cx, number: u64) {
        self.shared.flushes.succeeded(number);
        self.unflushed.trim(self.shared.flushes.last());
        while let Some(&id) = self.held.front() {
            if !self.keep(cx, id) {
                return;
            }
            self.held.pop_front();
            self.complete_request(cx, id, 0);
        }
    }

    /// Completes the request if it has no commands left, or sends its flush.
    fn settle_request(&mut self, cx: &mut Cx, id: RequestId) {
        let progress = &mut self.progress[id.0 as usize];
        if progress.commands > 0 || progress.waits {
            return;
        }
        if progress.flush == Flush::After && progress.errno == 0 {
            progress.flush = Flush::Due;
            progress.waits = true;
            return self.waiting.push_back(id);
        }
        match (progress.errno, progress.flush) {
            (0, Flush::Asked(_)) if self.shared.flushes.is_distrusted() => {
                progress.flush = Flush::Due;
                progress.waits = true;
                return self.waiting.push_back(id);
            }
            (0, Flush::Asked(number)) => self.has_flushed(cx, number),
            (0, _) if !self.keep(cx, id) => return self.held.push_back(id),
            _ => {}
        }
        let errno = self.progress[id.0 as usize].errno;
        self.complete_request(cx, id, errno);
    }

    /// Keeps a completed write. Durable writes are kept, too: otherwise an older write to the same
    /// place, when sent again, would overwrite them. Returns false if there is no room.
    #[inline]
    fn keep(&mut self, cx: &Cx, id: RequestId) -> bool {
        let request = &cx.slab[id];
        let writes = matches!(request.op, Op::Write | Op::Discard | Op::WriteZeroes);
        // No write is ever sent again to a disk on which every write is durable.
        if !writes || self.shared.options.writethrough || !self.shared.export.has_cache() {
            return true;
        }
        // Writes that other flushes have made durable make room.
        self.unflushed.trim(self.shared.flushes.last());
        let (sequence, mark) = self.shared.flushes.wrote();
        // SAFETY: the request is in flight; writes longer than [`LONGEST`] have a flush of their
        // own.
        unsafe { self.unflushed.keep(request, sequence, mark) }
    }

    fn complete_request(&self, cx: &mut Cx, id: RequestId, errno: i32) {
        if errno != 0 {
            let request = &cx.slab[id];
            let (op, at, len) = (request.op, request.at, request.len);
            report(&self.shared.endpoint.name(), op, at, len, errno);
        }
        cx.complete(id, errno);
    }

    /// Restarts all unfinished requests from the beginning. The connections are gone, and nothing
    /// is in flight.
    pub(super) fn take_back(&mut self, cx: &mut Cx) {
        let mut asked: Vec<RequestId> = self.waiting.drain(..).chain(self.held.drain(..)).collect();
        for connection in &self.connections {
            let table = &connection.table;
            asked.extend(table.indexes().map(|index| table.ask(index).id));
        }
        asked.sort_unstable_by_key(|id| id.0);
        asked.dedup();
        asked.retain(|id| *id != RequestId::NOBODY);
        self.own_flush = None;
        for id in asked {
            let Progress { errno, lost_at, .. } = self.progress[id.0 as usize];
            self.begin(cx, id);
            let progress = &mut self.progress[id.0 as usize];
            // The server may have rejected a part of the request.
            progress.errno = errno;
            // A server that is found and lost again and again must not make the request wait
            // forever.
            progress.lost_at = lost_at.or(progress.lost_at);
        }
    }

    /// Returns the time since when the longest-waiting request has waited.
    pub(super) fn oldest_waiting(&self) -> Option<u64> {
        let waiting = self.waiting.iter();
        waiting
            .filter_map(|id| self.progress[id.0 as usize].lost_at)
            .min()
    }

    /// Fails waiting requests that `fails` selects with EIO.
    pub(super) fn fail_waiting(
        &mut self,
        cx: &mut Cx,
        fails: impl Fn(&Cx, &Progress, RequestId) -> bool,
    ) {
        for _ in 0..self.waiting.len() {
            let Some(id) = self.waiting.pop_front() else {
                break;
            };
            let progress = &mut self.progress[id.0 as usize];
            if progress.commands == 0 && fails(cx, progress, id) {
                progress.waits = false;
                self.complete_request(cx, id, libc::EIO);
            } else {
                self.waiting.push_back(id);
            }
        }
    }
}
