//! Parses received bytes and turns commands into requests.

use super::check::{Kind, Refusal, Verdict, check, check_range};
use super::inbox::IN_PLACE;
use super::pool::{BLOCK, PAGE, Span};
use super::reply::To;
use super::{Ending, Held, NbdSource};
use fathom_core::{Cx, Op, Request, RequestId, Wire};
use fathom_nbd::protocol::{ErrorCode, RequestHeader, command_flag, u32_at, u64_at};
use fathom_units::cause;
use libc::iovec;
use std::cmp::min;

/// Bytes of data that one `pop` starts to move, exceeded by at most one request. The limit gives
/// the other connections of the worker their turn.
const BUDGET: u64 = 512 << 10;

/// Maximum number of requests in flight for commands that are split into pieces.
const SPLIT_IN_FLIGHT: usize = 4;

/// Bytes of data waiting to be sent from which long reads pause.
const SPLIT_WAITING: usize = BLOCK;

/// Bytes of data waiting to be sent from which no command is accepted.
///
/// The client does not read fast enough, and waiting data falls out of the CPU's cache. The limit
/// exceeds what long reads can leave waiting, so that other requests can overtake them.
const MAX_WAITING: usize = SPLIT_WAITING + (SPLIT_IN_FLIGHT + 1) * BLOCK;

/// Size in bytes of the buffer for extents in the disk's reply to a block status.
const STATUS_BYTES: usize = 16 << 10;

/// State of one call of `pop`.
pub(super) struct Intake<'a> {
    pub cx: &'a mut Cx,
    pub batch: &'a mut Vec<RequestId>,
    pub room: usize,
    pub budget: u64,
    /// Number of commands that were answered without a request.
    pub answered: u32,
}

impl<'a> Intake<'a> {
    pub(super) fn new(cx: &'a mut Cx, room: usize, batch: &'a mut Vec<RequestId>) -> Intake<'a> {
        Intake {
            cx,
            batch,
            room,
            budget: BUDGET,
            answered: 0,
        }
    }
}

/// Longest payload of a refused command that is received and dropped, in bytes. A client that
/// announces a longer one is disconnected.
const MAX_DROPPED: u64 = u32::MAX as u64;

/// The payload of a command that is being received.
pub(super) struct Payload {
    /// The write that the payload belongs to, or None if the command was refused and its payload is
    /// dropped.
    pub command: Option<u16>,
    /// The error reply to a refused command, sent after its payload has been received.
    pub refusal: Option<(To, Refusal)>,
    /// Bytes that are not part of a piece yet.
    pub left: u64,
    /// The piece that is being received.
    pub piece: Option<Piece>,
}

/// A part of a payload that becomes one request.
pub(super) struct Piece {
    pub span: Span,
    pub len: usize,
    pub filled: usize,
}

impl Payload {
    /// Returns the unfilled part of the current piece: its span, the bytes filled, and the bytes
    /// left.
    pub(super) fn target(&self) -> Option<(Span, usize, usize)> {
        let piece = self.piece.as_ref()?;
        Some((piece.span, piece.filled, piece.len - piece.filled))
    }

    /// Returns true if the client has not sent all of the payload.
    pub(super) fn is_incomplete(&self) -> bool {
        let piece = self.piece.as_ref();
        self.left > 0 || piece.is_some_and(|piece| piece.filled < piece.len)
    }

    pub(super) fn filled(&mut self, bytes: usize) {
        if let Some(piece) = &mut self.piece {
            piece.filled += bytes;
        }
    }

    /// Returns the memory of the current piece.
    pub(super) fn into_span(self) -> Option<Span> {
        self.piece.map(|piece| piece.span)
    }
}

/// Why the intake stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// All received bytes are parsed.
    NeedsBytes,
    /// No memory or no free request is left, or the client does not read its replies.
    NeedsRoom,
    /// The connection has used its share of this iteration.
    HadItsTurn,
}

impl NbdSource {
    /// Accepts commands until bytes, room or budget run out.
    pub(super) fn take_in(&mut self, intake: &mut Intake<'_>) -> Stop {
        if !self.issue_split(intake) {
            return Stop::NeedsRoom;
        }
        while self.serving {
            if let Err(why) = self.decrypt() {
                self.leave(Ending::Failed(why));
                break;
            }
            let stop = if self.payload.is_some() {
                self.take_payload(intake)
            } else {
                self.take_command(intake)
            };
            if let Err(stop) = stop {
                return stop;
            }
        }
        Stop::NeedsBytes
    }

    /// Accepts one command. Returns an error, with the command left in the inbox, if it must wait.
    #[inline]
    fn take_command(&mut self, intake: &mut Intake<'_>) -> Result<(), Stop> {
        let header_len = self.agreed.replies.request_len();
        let bytes = self.inbox.peek(header_len).ok_or(Stop::NeedsBytes)?;
        if intake.budget == 0 {
            return Err(Stop::HadItsTurn);
        }
        let unread = self.outbox.is_full() || self.outbox.waiting() >= MAX_WAITING;
        if intake.room == 0 || self.table.is_full() || unread {
            return Err(Stop::NeedsRoom);
        }
        let header = match RequestHeader::parse(self.agreed.replies, bytes) {
            Ok(header) => header,
            Err(error) => {
                self.leave(Ending::Failed(cause(error)));
                return Ok(());
            }
        };
        if self.mover.is_some() && self.answer_mover(&header, intake) {
            return Ok(());
        }
        match check(&self.export, self.agreed, &header) {
            Ok(Verdict::Do(Kind::Write)) => self.begin_write(&header, intake),
            Ok(Verdict::Do(kind)) => self.begin(kind, &header, header.len, header_len, intake),
            Ok(Verdict::Filter) => self.begin_filtered(&header, intake),
            Ok(Verdict::Disconnect) => {
                self.leave(Ending::Disconnected);
                Ok(())
            }
            Err(refusal) => {
                self.refuse(&header, refusal, intake);
                Ok(())
            }
        }
    }

    /// Refuses a command. The error reply is sent after the command's payload has been received.
    ///
    /// Clients send a whole command before they expect its reply, and libnbd drops a connection
    /// whose server replies earlier.
    #[cold]
    fn refuse(&mut self, header: &RequestHeader, refusal: Refusal, intake: &mut Intake<'_>) {
        self.inbox.consume(self.agreed.replies.request_len());
        if !header.has_payload(self.agreed.replies) || header.len == 0 {
            return self.answer_refusal(to(header), refusal, intake);
        }
        if header.len > MAX_DROPPED {
            let why = format!("a payload of {} bytes", header.len);
            return self.leave(Ending::Failed(why));
        }
        self.payload = Some(Payload {
            command: None,
            refusal: Some((to(header), refusal)),
            left: header.len,
            piece: None,
        });
    }

    #[cold]
    fn answer_refusal(&mut self, to: To, Refusal(code, text): Refusal, intake: &mut Intake<'_>) {
        self.reply().error(to, code, text);
        intake.cx.refused += 1;
        self.answered_early(intake);
    }

    pub(super) fn answered_early(&mut self, intake: &mut Intake<'_>) {
        intake.answered += 1;
        self.answered += 1;
    }

    /// Starts a command whose `received` bytes, header and any payload, are next in the inbox.
    ///
    /// The bytes stay in the inbox if the command cannot start yet. A read in one piece starts only
    /// when all of its memory is available, so that started commands never wait for each other's
    /// memory.
    #[inline]
    fn begin(
        &mut self,
        kind: Kind,
        header: &RequestHeader,
        len: u64,
        received: usize,
        intake: &mut Intake<'_>,
    ) -> Result<(), Stop> {
        if len == 0 && kind != Kind::Flush {
            self.inbox.consume(received);
            match kind {
                Kind::Read { .. } => self.reply().nothing(to(header)),
                _ => self.reply().done(to(header)),
            }
            self.answered_early(intake);
            return Ok(());
        }
        let index = self.enter(kind, header, len);
        if kind == (Kind::Read { whole: true }) && !self.take_memory(index) {
            self.table.put(index);
            return Err(Stop::NeedsRoom);
        }
        self.inbox.consume(received);
        let split = len > self.longest(kind);
        self.table[index].split = split;
        if !split && self.issue(index, intake) {
            return Ok(());
        }
        self.splitting.push_back(index);
        match self.issue_split(intake) {
            true => Ok(()),
            false => Err(Stop::NeedsRoom),
        }
    }

    /// Returns the maximum number of bytes that one request of this kind covers.
    #[inline]
    pub(super) fn longest(&self, kind: Kind) -> u64 {
        match kind {
            Kind::Flush | Kind::BlockStatus { .. } => u64::MAX,
            Kind::Trim => max_len(self.export.discard),
            Kind::WriteZeroes { .. } => max_len(self.export.write_zeroes),
            Kind::Read { .. } | Kind::Cache | Kind::Write => BLOCK as u64,
        }
    }

    /// Takes memory for all data of a read in one piece, unless it has been taken. Returns false if
    /// there is not enough.
    #[inline]
    fn take_memory(&mut self, index: u16) -> bool {
        let command = &mut self.table[index];
        !command.spans.is_empty() || self.pool.take_all(command.len as usize, &mut command.spans)
    }

    fn enter(&mut self, kind: Kind, header: &RequestHeader, len: u64) -> u16 {
        let index = self.table.take();
        let command = &mut self.table[index];
        command.kind = kind;
        command.fua = header.flags & command_flag::FUA != 0;
        command.cookie = header.cookie;
        command.offset = header.offset;
        command.len = len;
        index
    }

    fn is_issued(&self, index: u16) -> bool {
        let command = &self.table[index];
        command.issued == command.len
    }

    /// Starts a write. A small payload is used in place; a large one is received into its own
    /// pages.
    #[inline]
    fn begin_write(&mut self, header: &RequestHeader, intake: &mut Intake<'_>) -> Result<(), Stop> {
        let header_len = self.agreed.replies.request_len();
        let len = header.len as usize;
        if len == 0 || len > IN_PLACE {
            self.inbox.consume(header_len);
            if len == 0 {
                self.reply().done(to(header));
                self.answered_early(intake);
                return Ok(());
            }
            let index = self.enter(Kind::Write, header, header.len);
            self.inbox.narrow();
            self.payload = Some(Payload {
                command: Some(index),
                refusal: None,
                left: header.len,
                piece: None,
            });
            return Ok(());
        }
        if self.inbox.len() < header_len + len {
            return Err(Stop::NeedsBytes);
        }
        self.inbox.consume(header_len);
        let index = self.enter(Kind::Write, header, header.len);
        let (at, block) = self.inbox.lend(len);
        self.push(index, len as u64, at, len, Held::InPlace(block), intake);
        Ok(())
    }

    /// Starts a block status whose payload holds the range and the contexts.
    #[cold]
    fn begin_filtered(
        &mut self,
        header: &RequestHeader,
        intake: &mut Intake<'_>,
    ) -> Result<(), Stop> {
        const ONE: usize = 12;
        let header_len = self.agreed.replies.request_len();
        let unknown = Refusal(
            ErrorCode::Invalid,
            "not a metadata context that was negotiated",
        );
        if header.len != ONE as u64 {
            self.refuse(header, unknown, intake);
            return Ok(());
        }
        let bytes = self.inbox.peek(header_len + ONE).ok_or(Stop::NeedsBytes)?;
        let len = u64_at(bytes, header_len);
        let context = u32_at(bytes, header_len + 8);
        let one = header.flags & command_flag::REQ_ONE != 0;
        let kind = Kind::BlockStatus { one };
        let checked = match Some(context) == self.agreed.allocation_context {
            true => check_range(&self.export, kind, header.offset, len),
            false => Err(unknown),
        };
        if let Err(refusal) = checked {
            self.refuse(header, refusal, intake);
            return Ok(());
        }
        self.begin(kind, header, len, header_len + ONE, intake)
    }

    /// Receives more of a payload. Each complete piece becomes a request.
    fn take_payload(&mut self, intake: &mut Intake<'_>) -> Result<(), Stop> {
        let Some(payload) = &mut self.payload else {
            return Ok(());
        };
        let Some(index) = payload.command else {
            let here = min(payload.left, self.inbox.len() as u64);
            self.inbox.consume(here as usize);
            payload.left -= here;
            if payload.left > 0 {
                return Err(Stop::NeedsBytes);
            }
            let refusal = payload.refusal;
            self.payload = None;
            if let Some((to, refusal)) = refusal {
                self.answer_refusal(to, refusal, intake);
            }
            return Ok(());
        };
        let piece = match &mut payload.piece {
            Some(piece) => piece,
            none => {
                let command = &self.table[index];
                let at = command.offset + command.len - payload.left;
                let len = min(payload.left, up_to_a_block(at, BLOCK as u64)) as usize;
                let span = self.pool.take(len).ok_or(Stop::NeedsRoom)?;
                payload.left -= len as u64;
                none.insert(Piece {
                    span,
                    len,
                    filled: 0,
                })
            }
        };
        let at = self.pool.at(piece.span);
        // SAFETY: `copy_out` fills at most the rest of the piece, which belongs to this connection.
        piece.filled += unsafe {
            self.inbox
                .copy_out(at.add(piece.filled), piece.len - piece.filled)
        };
        if piece.filled < piece.len {
            return Err(Stop::NeedsBytes);
        }
        if intake.room == 0 {
            return Err(Stop::NeedsRoom);
        }
        let (span, len) = (piece.span, piece.len);
        payload.piece = None;
        if payload.left == 0 {
            self.payload = None;
        }
        self.push(index, len as u64, at, len, Held::Pages(span), intake);
        Ok(())
    }

    /// Issues the next pieces of split commands, one of each command in turn. Returns false if a
    /// command lacks memory. The other commands are issued nevertheless, since they may hold the
    /// missing memory.
    fn issue_split(&mut self, intake: &mut Intake<'_>) -> bool {
        let (mut idle, mut has_memory) = (0, true);
        while idle < self.splitting.len()
            && self.split_in_flight < SPLIT_IN_FLIGHT
            && intake.room > 0
        {
            let Some(index) = self.splitting.pop_front() else {
                break;
            };
            let may_go_on = self.may_go_on(index);
            if may_go_on && self.issue(index, intake) {
                idle = 0;
            } else {
                has_memory &= !may_go_on;
                idle += 1;
            }
            if !self.is_issued(index) {
                self.splitting.push_back(index);
            }
        }
        has_memory
    }

    fn may_go_on(&self, index: u16) -> bool {
        let grows = matches!(self.table[index].kind, Kind::Read { whole: false });
        !grows || self.outbox.waiting() < SPLIT_WAITING
    }

    /// Issues a request for the next piece of a command. Returns false if there is no free request
    /// or no memory.
    #[inline]
    fn issue(&mut self, index: u16, intake: &mut Intake<'_>) -> bool {
        if intake.room == 0 {
            return false;
        }
        let longest = self.longest(self.table[index].kind);
        let command = &mut self.table[index];
        // The spans of a read in one piece are indexed from the start of the read.
        let longest = match command.kind {
            Kind::Read { whole: true } => longest,
            _ if command.split => up_to_a_block(command.offset + command.issued, longest),
            _ => longest,
        };
        let len = min(command.len - command.issued, longest);
        let buffer = match command.kind {
            Kind::Flush | Kind::Trim | Kind::WriteZeroes { .. } => 0,
            Kind::BlockStatus { one: true } => size_of::<u64>(),
            Kind::BlockStatus { one: false } => STATUS_BYTES,
            Kind::Read { .. } | Kind::Cache => len as usize,
            Kind::Write => unreachable!("a write is issued by its payload"),
        };
        if buffer == 0 {
            self.push(index, len, std::ptr::null_mut(), 0, Held::Nothing, intake);
            return true;
        }
        let (whole, issued) = (command.kind == (Kind::Read { whole: true }), command.issued);
        let span = match whole {
            // A command that was handed over by another process has no memory yet.
            true => match self.take_memory(index) {
                true => Some(self.table[index].spans[issued as usize / BLOCK]),
                false => None,
            },
            false => self.pool.take(buffer),
        };
        let Some(span) = span else {
            return false;
        };
        let at = self.pool.at(span);
        self.push(index, len, at, buffer, Held::Pages(span), intake);
        true
    }

    /// Issues the request for the next `len` bytes of a command, with its buffer.
    #[inline]
    fn push(
        &mut self,
        index: u16,
        len: u64,
        at: *mut u8,
        buffer: usize,
        held: Held,
        intake: &mut Intake<'_>,
    ) {
        let command = &mut self.table[index];
        let id = intake.cx.slab.take().expect("room was promised");
        let request = &mut intake.cx.slab[id];
        fill(request, command.kind);
        request.fua = command.fua || !self.export.write_cache;
        request.queue = self.number;
        request.tag = index;
        request.offset = command.offset + command.issued;
        request.len = len;
        request.cookie = held.to_u64();
        request.wire = Wire::Came(command.cookie);
        request.segments.clear();
        if buffer > 0 {
            request.segments.push(iovec {
                iov_base: at.cast(),
                iov_len: buffer,
            });
        }
        command.issued += len;
        command.pending += 1;
        self.split_in_flight += usize::from(command.split);
        intake.room -= 1;
        intake.budget = intake.budget.saturating_sub(buffer as u64);
        intake.batch.push(id);
    }
}

fn fill(request: &mut Request, kind: Kind) {
    request.unmap = kind == Kind::Trim || kind == (Kind::WriteZeroes { unmap: true });
    request.op = match kind {
        Kind::Read { .. } | Kind::Cache => Op::Read,
        Kind::Write => Op::Write,
        Kind::Flush => Op::Flush,
        Kind::Trim => Op::Discard,
        Kind::WriteZeroes { .. } => Op::WriteZeroes,
        Kind::BlockStatus { .. } => Op::BlockStatus,
    };
}

/// Returns how many bytes, at most `longest`, a request at `at` covers if it ends at a page
/// boundary. Thus a split command has partial blocks only at its two ends.
#[inline]
fn up_to_a_block(at: u64, longest: u64) -> u64 {
    longest - at % min(longest, PAGE as u64)
}

/// Returns the maximum length of a range request, rounded down to 64 KiB or at least to sectors.
fn max_len(limits: Option<fathom_core::RangeLimits>) -> u64 {
    let len = limits.map_or(u64::MAX, |limits| limits.max_len);
    (len & !0xffff).max(len.min(0xffff) & !511).max(512)
}

pub(super) fn to(header: &RequestHeader) -> To {
    To {
        cookie: header.cookie,
        offset: header.offset,
    }
}
