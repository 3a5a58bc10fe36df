//! Turns completed requests into replies.

use super::check::Kind;
use super::pool::{BLOCK, Span};
use super::reply::{Data, Reply, To};
use super::{Held, NbdSource};
use fathom_core::extents::extents;
use fathom_core::{Request, Status, is_zero};
use fathom_nbd::protocol::{ErrorCode, state};

/// Length in bytes from which the data of a read is scanned for zeroes; zeroes are sent as a hole
/// chunk.
///
/// The scan stops at the first byte that is not zero. A scan of zeroes costs less than the two
/// copies that the kernel would make of them. A small read is not worth the scan. The disk is not
/// asked for its block status: a client that asks for it does not read holes at all.
const LOOK_FOR_HOLES: usize = 64 << 10;

impl NbdSource {
    pub(super) fn reply(&mut self) -> Reply<'_> {
        Reply {
            outbox: &mut self.outbox,
            replies: self.agreed.replies,
        }
    }

    /// Accounts for a completed request and replies when its command is complete.
    #[inline]
    pub(super) fn request_done(&mut self, request: &Request) {
        let index = request.tag;
        let command = &mut self.table[index];
        command.pending -= 1;
        self.split_in_flight -= usize::from(command.split);
        if request.error != 0 {
            command.fail(ErrorCode::from_errno(request.error), request.offset);
        }
        let (kind, over) = (command.kind, command.is_over());
        let held = Held::from_u64(request.cookie);
        match (kind, held) {
            (Kind::Read { whole: true }, _) => {}
            (Kind::Read { whole: false }, Held::Pages(span)) if request.error == 0 => {
                if self.answer_read(request, span, over) {
                    return;
                }
            }
            (Kind::BlockStatus { .. }, Held::Pages(span)) if request.error == 0 => {
                self.answer_status(request, span);
                return self.forget(index);
            }
            _ => self.release(held),
        }
        if over {
            self.conclude(index);
        }
    }

    fn forget(&mut self, index: u16) {
        self.answered += 1;
        self.table.put(index);
    }

    /// Replies to one piece of a read that is carried out in pieces. Returns true if the whole
    /// command is done.
    #[inline]
    fn answer_read(&mut self, request: &Request, span: Span, over: bool) -> bool {
        let command = &self.table[request.tag];
        let done = over && command.failure.is_none();
        let to = To {
            cookie: command.cookie,
            offset: command.offset,
        };
        let (at, len) = (self.pool.at(span), request.len as usize);
        // SAFETY: the disk has completed the request, so this connection owns the pages again.
        if len >= LOOK_FOR_HOLES && is_zero(unsafe { std::slice::from_raw_parts(at, len) }) {
            self.reply().hole(to, request.offset, len as u32, done);
            self.pool.put(span);
        } else {
            let data = Data { at, len, span };
            self.reply().data(to, request.offset, data, done);
        }
        if done {
            self.forget(request.tag);
        }
        done
    }

    fn answer_status(&mut self, request: &Request, span: Span) {
        let to = To {
            cookie: self.table[request.tag].cookie,
            offset: request.offset,
        };
        let (allocation, bitmap) = (self.agreed.allocation_context, self.agreed.bitmap_context);
        let len = request.segments.first().map_or(0, |s| s.iov_len);
        // SAFETY: the disk has completed the request, so this connection owns the pages again.
        let words = unsafe { std::slice::from_raw_parts(self.pool.at(span), len) };
        if let Some(context) = allocation {
            let done = bitmap.is_none();
            self.reply()
                .extents(to, context, joined(words, flags), done);
        }
        if let Some(context) = bitmap {
            self.reply()
                .extents(to, context, joined(words, dirty_flags), true);
        }
        self.pool.put(span);
    }

    /// Replies to a command whose requests have all completed.
    pub(super) fn conclude(&mut self, index: u16) {
        let command = &mut self.table[index];
        if command.is_unanswerable {
            return self.table.put(index);
        }
        let mut spans = std::mem::take(&mut command.spans);
        let to = To {
            cookie: command.cookie,
            offset: command.offset,
        };
        let (kind, len) = (command.kind, command.len as usize);
        match command.failure {
            Some(failure) => {
                spans.drain(..).for_each(|span| self.pool.put(span));
                match len {
                    // An error offset would not lie within a command of 0 bytes.
                    0 => {
                        let text = format!("{} failed: {}", verb(kind), failure.code.text());
                        self.reply().error(to, failure.code, &text);
                    }
                    _ => self.reply().failure(to, failure, verb(kind)),
                }
            }
            None if matches!(kind, Kind::Read { .. }) => {
                self.reply().begin_data(to, len);
                for (n, span) in spans.drain(..).enumerate() {
                    let (at, len) = (self.pool.at(span), BLOCK.min(len - n * BLOCK));
                    self.reply().more(Data { at, len, span });
                }
            }
            None => self.reply().done(to),
        }
        self.table[index].spans = spans;
        self.forget(index);
    }

    /// Releases the memory of a request.
    #[inline]
    fn release(&mut self, held: Held) {
        match held {
            Held::Nothing => {}
            Held::Pages(span) => self.pool.put(span),
            Held::InPlace(block) => self.inbox.release(block, &mut self.pool),
        }
    }

    /// Stops issuing requests of any command; requests in flight complete.
    ///
    /// A command whose payload is incomplete gets no reply: clients expect none before they have
    /// sent all of a command.
    pub(super) fn abandon(&mut self) {
        if let Some(payload) = self.payload.take() {
            if let Some(index) = payload.command {
                self.table[index].is_unanswerable = payload.is_incomplete();
            }
            let span = payload.into_span();
            span.into_iter().for_each(|span| self.pool.put(span));
        }
        self.splitting.clear();
        for index in self.table.unissued() {
            let command = &mut self.table[index];
            command.fail(ErrorCode::Shutdown, command.offset + command.issued);
            command.issued = command.len;
            if command.is_over() {
                self.conclude(index);
            }
        }
    }
}

/// Merges consecutive extents with the same flags in this context.
fn joined(words: &[u8], flags: fn(Status) -> u32) -> impl Iterator<Item = (u32, u64)> {
    let mut extents = extents(words).map(move |(status, len)| (flags(status), len));
    let mut next = extents.next();
    std::iter::from_fn(move || {
        let (flags, mut len) = next.take()?;
        loop {
            match extents.next() {
                Some((same, more)) if same == flags => len += more,
                other => {
                    next = other;
                    return Some((flags, len));
                }
            }
        }
    })
}

/// Returns the extent flags of `qemu:dirty-bitmap`.
fn dirty_flags(status: Status) -> u32 {
    if status.dirty { state::DIRTY } else { 0 }
}

/// Returns the extent flags of `base:allocation`.
fn flags(status: Status) -> u32 {
    let hole = if status.hole { state::HOLE } else { 0 };
    hole | if status.zero { state::ZERO } else { 0 }
}

fn verb(kind: Kind) -> &'static str {
    match kind {
        Kind::Read { .. } => "read",
        Kind::Write => "write",
        Kind::Flush => "flush",
        Kind::Trim => "trim",
        Kind::WriteZeroes { .. } => "write of zeroes",
        Kind::Cache => "cache",
        Kind::BlockStatus { .. } => "block status",
    }
}
