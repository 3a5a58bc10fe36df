//! Pauses a connection and hands it over to another process.
//!
//! A *held* connection has nothing in flight, neither at the disk nor at its socket. The connection
//! may stop between any two bytes that it receives or sends; its state includes the unfinished
//! parts of its commands.

use super::check::{Kind, Refusal, check_range};
use super::intake::{Payload, Piece};
use super::pool::BLOCK;
use super::reply::To;
use super::table::{Command, Failure};
use super::{Agreed, ExportView, Limits, NbdSource, OnEnd, SEND, Stream};
use fathom_core::{Cx, RangeLimits, SourceId};
use fathom_nbd::protocol::{ErrorCode, Replies};
use fathom_sockets::Descriptors;
use fathom_units::cause;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

/// How a held connection reaches another process.
pub enum Described {
    /// By this state and the files that accompany it.
    State(Box<SourceState>),
    /// Not at all: the keys of its TLS session exist only in this process.
    Encrypted,
    /// Not at all: its client reconnects by itself and loses nothing.
    Reconnects,
}

/// Saved state of a connection. File numbers are indices into the list of files that accompanies
/// it.
#[derive(Debug, Serialize, Deserialize)]
pub struct SourceState {
    socket: usize,
    view: ViewState,
    /// Index into `REPLIES`.
    replies: u8,
    allocation_context: Option<u32>,
    commands: Vec<CommandState>,
    payload: Option<PayloadState>,
    /// File that contains, in this order: the received part of the payload's piece, the received
    /// bytes that are not parsed, and the replies that are not sent.
    buffers: Option<usize>,
    received: usize,
    to_send: usize,
    answered: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct ViewState {
    name: String,
    size: u64,
    minimum_block: u32,
    preferred_block: u32,
    read_only: bool,
    write_cache: bool,
    /// Alignment and maximum length in bytes.
    discard: Option<(u32, u64)>,
    write_zeroes: Option<(u32, u64)>,
}

/// Saved state of an unfinished command.
#[derive(Debug, Serialize, Deserialize)]
struct CommandState {
    /// Name of the kind in `KINDS`.
    kind: String,
    fua: bool,
    cookie: u64,
    offset: u64,
    len: u64,
    issued: u64,
    /// The protocol's error number, and the offset of the failure.
    failure: Option<(u32, u64)>,
}

#[derive(Debug, Serialize, Deserialize)]
struct PayloadState {
    /// Index of the write that the payload belongs to, or None if the command was refused.
    command: Option<usize>,
    /// The error reply that follows the payload of a refused command.
    #[serde(default)]
    refusal: Option<RefusalState>,
    /// Bytes that are not part of a piece yet.
    left: u64,
    /// Length of the piece that is being received, and the bytes received of it.
    piece: Option<(usize, usize)>,
}

/// Saved error reply to a refused command.
#[derive(Debug, Serialize, Deserialize)]
struct RefusalState {
    cookie: u64,
    offset: u64,
    /// The protocol's error number.
    code: u32,
}

const REPLIES: [Replies; 3] = [Replies::Simple, Replies::Structured, Replies::Extended];

const KINDS: [(&str, Kind); 10] = [
    ("read", Kind::Read { whole: false }),
    ("whole read", Kind::Read { whole: true }),
    ("write", Kind::Write),
    ("flush", Kind::Flush),
    ("trim", Kind::Trim),
    ("write zeroes", Kind::WriteZeroes { unmap: false }),
    ("unmap zeroes", Kind::WriteZeroes { unmap: true }),
    ("cache", Kind::Cache),
    ("block status", Kind::BlockStatus { one: false }),
    ("one block status", Kind::BlockStatus { one: true }),
];

impl ViewState {
    fn of(view: &ExportView) -> ViewState {
        let limits = |limits: RangeLimits| (limits.alignment, limits.max_len);
        ViewState {
            name: view.name.clone(),
            size: view.size,
            minimum_block: view.minimum_block,
            preferred_block: view.preferred_block,
            read_only: view.read_only,
            write_cache: view.write_cache,
            discard: view.discard.map(limits),
            write_zeroes: view.write_zeroes.map(limits),
        }
    }

    fn into_view(self) -> ExportView {
        let limits = |(alignment, max_len)| RangeLimits { alignment, max_len };
        ExportView {
            name: self.name,
            size: self.size,
            minimum_block: self.minimum_block,
            preferred_block: self.preferred_block,
            read_only: self.read_only,
            write_cache: self.write_cache,
            discard: self.discard.map(limits),
            write_zeroes: self.write_zeroes.map(limits),
        }
    }
}

impl CommandState {
    fn of(command: &Command) -> CommandState {
        let (kind, _) = KINDS
            .into_iter()
            .find(|(_, kind)| *kind == command.kind)
            .expect("all kinds have names");
        let failure = command.failure;
        CommandState {
            kind: kind.to_owned(),
            fua: command.fua,
            cookie: command.cookie,
            offset: command.offset,
            len: command.len,
            issued: match command.kind {
                // The data that was read is not saved, so the read starts again.
                Kind::Read { whole: true } => 0,
                _ => command.issued,
            },
            failure: failure.map(|failure| (failure.code as u32, failure.offset)),
        }
    }

    fn kind(&self) -> Result<Kind, String> {
        let named = KINDS.iter().find(|(name, _)| *name == self.kind);
        let (_, kind) = named.ok_or_else(|| format!("unknown command '{}'", self.kind))?;
        Ok(*kind)
    }
}

impl NbdSource {
    /// Pauses the connection: operations in flight complete, and its state is kept. Runs on the
    /// worker.
    pub(super) fn hold(&mut self, cx: &mut Cx) {
        self.serving = false;
        self.held = true;
        self.settle(cx);
    }

    /// Stops the source when nothing is in flight any more.
    pub(super) fn settle_held(&mut self, cx: &mut Cx, id: SourceId) {
        if self.outbox.in_flight() && !std::mem::replace(&mut self.send_cancelled, true) {
            cx.engine.cancel_socket(id.token(SEND));
        }
        let busy = self.receive.in_flight || self.outbox.in_flight() || self.table.in_flight() > 0;
        if !busy {
            cx.engine.remove_socket(self.socket.as_fd());
            self.stopped = true;
        }
    }

    /// Returns true if the connection was paused, rather than ended, when it was detached.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Prepares a held connection for being attached again to a disk with the properties `now`.
    ///
    /// The client knows only the properties from its handshake; commands that the disk no longer
    /// supports are refused.
    pub fn go_on(&mut self, now: &ExportView) {
        let known = &mut self.export;
        known.read_only |= now.read_only;
        known.write_cache &= now.write_cache;
        known.discard = known.discard.and(now.discard);
        known.write_zeroes = known.write_zeroes.and(now.write_zeroes);
        self.serving = true;
        self.held = false;
        self.stopping = false;
        self.stopped = false;
        self.send_cancelled = false;
        self.receive.forget_cancel();
        self.activity.hold(false);
    }

    /// Describes a held connection for another process. The error is a sentence for the user.
    pub fn describe(&self, files: &mut Descriptors) -> Result<Described, String> {
        match &self.mover {
            // The successor of this server knows which server has taken over the disk, and tells a
            // client that reconnects.
            Some(mover) if mover.has_taken_over() => return Ok(Described::Reconnects),
            Some(_) => {
                return Err(
                    "the client is taking the disk over, and must complete that first".into(),
                );
            }
            None => {}
        }
        if self.tls.is_some() {
            return Ok(Described::Encrypted);
        }
        let failed =
            |error: io::Error| format!("cannot duplicate its file descriptors: {}", cause(error));
        let indices = self.table.in_use();
        let payload = self.payload.as_ref().map(|payload| PayloadState {
            command: payload
                .command
                .and_then(|command| indices.iter().position(|index| *index == command)),
            refusal: payload.refusal.map(|(to, Refusal(code, _))| RefusalState {
                cookie: to.cookie,
                offset: to.offset,
                code: code as u32,
            }),
            left: payload.left,
            piece: payload
                .piece
                .as_ref()
                .map(|piece| (piece.len, piece.filled)),
        });
        let piece = self
            .payload
            .as_ref()
            .and_then(|payload| payload.piece.as_ref());
        let piece = piece.map_or(&[][..], |piece| {
            // SAFETY: this part of the piece's own pages has been received, and no receive is in
            // flight.
            unsafe { std::slice::from_raw_parts(self.pool.at(piece.span), piece.filled) }
        });
        let received = self.inbox.peek(self.inbox.len()).unwrap_or_default();
        let to_send = self.outbox.to_bytes();
        let buffers = file_of(&[piece, received, &to_send]).map_err(failed)?;
        let buffers = files.add_any(buffers.as_ref()).map_err(failed)?;
        let replies = REPLIES
            .iter()
            .position(|replies| *replies == self.agreed.replies);
        Ok(Described::State(Box::new(SourceState {
            socket: files.add(&self.socket).map_err(failed)?,
            view: ViewState::of(&self.export),
            replies: replies.expect("all are in the list") as u8,
            allocation_context: self.agreed.allocation_context,
            commands: indices
                .iter()
                .map(|index| CommandState::of(&self.table[*index]))
                .collect(),
            payload,
            buffers,
            received: received.len(),
            to_send: to_send.len(),
            answered: self.answered,
        })))
    }

    /// Restores a connection that another process described. The connection is held. The state is
    /// validated like input from a client.
    pub fn adopt(
        state: SourceState,
        files: &mut Descriptors,
        limits: Limits,
        number: u16,
        on_end: OnEnd,
    ) -> Result<NbdSource, String> {
        let failed = cause::<io::Error>;
        let [piece, read_ahead, to_send] = state.buffers(files)?;
        let stream = Stream {
            socket: files.take(state.socket)?,
            tls: None,
            read_ahead,
        };
        let replies = REPLIES.get(usize::from(state.replies));
        let agreed = Agreed {
            replies: *replies.ok_or("replies of an unknown kind")?,
            allocation_context: state.allocation_context,
            // Bitmaps belong to backups, whose disks end with their server.
            bitmap_context: None,
        };
        let view = state.view.into_view();
        let source = NbdSource::new(stream, &view, agreed, limits, number, on_end);
        let mut source = source.map_err(failed)?;
        if !to_send.is_empty() {
            source.outbox.bytes(&to_send);
        }
        source.answered = state.answered;
        let payload = state.payload.as_ref();
        let mut indices = Vec::new();
        for (at, command) in state.commands.iter().enumerate() {
            let is_payload = payload.is_some_and(|payload| payload.command == Some(at));
            indices.push(source.enter_again(command, is_payload)?);
        }
        if let Some(payload) = state.payload {
            source.take_payload_over(payload, &indices, &piece)?;
        }
        source.held = true;
        source.serving = false;
        source.stopped = true;
        Ok(source)
    }

    fn take_payload_over(
        &mut self,
        state: PayloadState,
        indices: &[u16],
        bytes: &[u8],
    ) -> Result<(), String> {
        let unknown = "a payload of no command";
        let index = state
            .command
            .map(|at| indices.get(at).copied().ok_or(unknown));
        let command = index.transpose()?;
        let in_piece = state.piece.map_or(0, |(len, _)| len as u64);
        let left = state.left.saturating_add(in_piece);
        let fits = command.is_none_or(|index| {
            let command = &self.table[index];
            command.issued + left == command.len
        });
        if !fits {
            return Err("a payload that does not fit its command".into());
        }
        let mut piece = None;
        if let Some((len, filled)) = state.piece {
            let span = self.pool.take(len).ok_or("no memory for a payload")?;
            // SAFETY: `buffers` has checked that `filled`, the length of `bytes`, is at most `len`,
            // the length of the span.
            unsafe {
                let at = self.pool.at(span);
                at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            }
            piece = Some(Piece { span, len, filled });
        }
        let refusal = state.refusal.map(|refusal| {
            let code = ErrorCode::from_errno(refusal.code as i32);
            let to = To {
                cookie: refusal.cookie,
                offset: refusal.offset,
            };
            (to, Refusal(code, code.text()))
        });
        self.payload = Some(Payload {
            command,
            refusal,
            left: state.left,
            piece,
        });
        Ok(())
    }

    fn enter_again(&mut self, state: &CommandState, is_payload: bool) -> Result<u16, String> {
        let kind = state.kind()?;
        let fits =
            kind == Kind::Flush || check_range(&self.export, kind, state.offset, state.len).is_ok();
        if !fits || state.issued > state.len || is_payload != (kind == Kind::Write) {
            return Err("an impossible command".into());
        }
        if self.table.is_full() {
            return Err("more commands than a client may have in flight".into());
        }
        let index = self.table.take();
        let split = state.len > self.longest(kind);
        let command = &mut self.table[index];
        command.kind = kind;
        command.fua = state.fua;
        command.split = split;
        command.cookie = state.cookie;
        command.offset = state.offset;
        command.len = state.len;
        command.issued = state.issued;
        command.failure = state.failure.map(|(code, offset)| Failure {
            code: ErrorCode::from_errno(code as i32),
            offset,
        });
        if !is_payload {
            self.splitting.push_back(index);
        }
        Ok(index)
    }
}

impl SourceState {
    fn buffers(&self, files: &mut Descriptors) -> Result<[Vec<u8>; 3], String> {
        let piece = self.payload.as_ref().and_then(|payload| payload.piece);
        let (len, filled) = piece.unwrap_or_default();
        let is_piece = piece.is_none() || (1..=BLOCK).contains(&len) && filled <= len;
        if !is_piece || self.received > BLOCK || self.to_send > MAX_TO_SEND {
            return Err("more replies than a client may have waiting".into());
        }
        let lengths = [filled, self.received, self.to_send];
        let mut buffers = lengths.map(|len| vec![0; len]);
        if let Some(number) = self.buffers {
            let file = File::from(files.take(number)?);
            let mut at = 0;
            for buffer in &mut buffers {
                let read = file.read_exact_at(buffer, at);
                read.map_err(cause)?;
                at += buffer.len() as u64;
            }
        }
        Ok(buffers)
    }
}

/// Creates a memory file with these parts; None if all are empty.
fn file_of(parts: &[&[u8]]) -> io::Result<Option<File>> {
    if parts.iter().all(|part| part.is_empty()) {
        return Ok(None);
    }
    let mut file = File::from(memfd_create("nbd connection", MemfdFlags::CLOEXEC)?);
    parts.iter().try_for_each(|part| file.write_all(part))?;
    Ok(Some(file))
}

/// Maximum number of unsent bytes in a saved state: more than any option lets a connection have.
const MAX_TO_SEND: usize = 1 << 30;
