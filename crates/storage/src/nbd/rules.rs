//! Checks a server's replies to commands.

use super::table::{Command, Table};
use fathom_core::{Extents, Status};
use fathom_nbd::protocol::{
    DIRTY_BITMAP, ErrorCode, MAX_STRING, chunk, command, errno, readable, state, u16_at, u32_at,
    u64_at,
};

/// Description of a protocol violation, after which the connection is abandoned.
pub(super) type Violation = String;

/// Description of a shutdown, which is no result of a request: the request is sent to the next
/// server.
pub(super) const SHUTS_DOWN: &str = "is shutting down";

/// The negotiated metadata context.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context {
    /// The server's ID of the context.
    pub(super) id: u32,
    pub(super) tells: Tells,
}

/// Meaning of a context's extents.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tells {
    /// Data and holes: base:allocation.
    Allocation,
    /// Blocks marked in a QEMU dirty bitmap are reported as data, and the others as holes.
    Dirty,
}

impl Tells {
    /// Returns the meaning of the context with this name.
    pub(super) fn of(context: &str) -> Tells {
        match context.starts_with(DIRTY_BITMAP) {
            true => Tells::Dirty,
            false => Tells::Allocation,
        }
    }

    fn status(self, flags: u32) -> Status {
        match self {
            Tells::Allocation => Status {
                hole: flags & state::HOLE != 0,
                zero: flags & state::ZERO != 0,
                dirty: false,
            },
            Tells::Dirty if flags & state::DIRTY != 0 => Status::DATA,
            Tells::Dirty => Status::HOLE,
        }
    }
}

/// Maximum length in bytes of a block status chunk that is accepted.
const MAX_STATUS: u32 = 8 << 20;

/// Records the arrival of the range `start..start + len` of a read.
pub(super) fn cover(entry: &mut Command, start: u32, len: u32) -> Result<(), Violation> {
    let covered = entry.coverage.add(start, start + len);
    covered.map_err(|_| "sent the same part of a reply twice".into())
}

/// Records the arrival of a range given by its offset on the export. Returns its start in the read.
pub(super) fn cover_at(entry: &mut Command, offset: u64, len: u32) -> Result<u32, Violation> {
    let ask = entry.ask;
    let start = offset.checked_sub(ask.offset);
    let start = start.filter(|start| {
        let end = start.checked_add(len.into());
        len > 0 && end.is_some_and(|end| end <= ask.len)
    });
    let Some(start) = start else {
        return Err(format!(
            "sent {len} bytes at offset {offset}, but the request was for {} at {}",
            ask.len, ask.offset
        ));
    };
    cover(entry, start as u32, len)?;
    Ok(start as u32)
}

/// Ends a command when the last part of its reply has arrived.
#[inline]
pub(super) fn end(table: &mut Table, index: u16, answered: &mut Vec<u16>) -> Result<(), Violation> {
    let entry = table.get(index);
    let expected = match entry.ask.command {
        command::READ => entry.ask.read_len(),
        command::BLOCK_STATUS => 1,
        _ => 0,
    };
    if entry.errno == 0 && expected > 0 && !entry.coverage.is_whole(expected) {
        return Err("ended a reply before all of its data".into());
    }
    entry.answered = true;
    answered.push(index);
    Ok(())
}

/// Returns how many bytes of a chunk must be available before it can be processed; of an error
/// chunk all.
pub(super) fn head_of(
    kind: u16,
    len: u32,
    last: bool,
    asked: u16,
    is_extended: bool,
) -> Result<usize, Violation> {
    let is_read = asked == command::READ;
    let is_status = asked == command::BLOCK_STATUS;
    match kind {
        chunk::NONE if len == 0 && last => Ok(0),
        chunk::OFFSET_DATA if is_read && len > 8 => Ok(8),
        chunk::OFFSET_HOLE if is_read && len == 12 => Ok(12),
        chunk::BLOCK_STATUS if is_status && !is_extended && is_list(len, 4, 8) => Ok(4),
        chunk::BLOCK_STATUS_EXT if is_status && is_extended && is_list(len, 8, 16) => Ok(8),
        _ if kind & chunk::ERROR_BIT != 0 && is_length_of_error(kind, len) => Ok(len as usize),
        _ => Err(format!(
            "sent an unexpected chunk of type {kind} and {len} bytes"
        )),
    }
}

/// Returns whether the length is that of a head and at least one extent, within the limit.
fn is_list(len: u32, head: u32, size: u32) -> bool {
    (head + size..=MAX_STATUS).contains(&len) && (len - head).is_multiple_of(size)
}

/// Checks the length of a chunk, which no server has reason to exceed.
pub(super) fn bounded(len: u64) -> Result<u32, Violation> {
    u32::try_from(len).map_err(|_| format!("sent an oversized chunk of {len} bytes"))
}

/// Size in bytes of one extent descriptor.
#[inline]
pub(super) fn extent_size(is_extended: bool) -> usize {
    if is_extended { 16 } else { 8 }
}

/// Returns whether an error chunk can have this length: an error number, the length of a text, the
/// text, and for one type an offset.
fn is_length_of_error(kind: u16, len: u32) -> bool {
    let least = if kind == chunk::ERROR_OFFSET { 14 } else { 6 };
    (least..=least + MAX_STRING as u32).contains(&len)
}

pub(super) fn error_of(kind: u16, head: &[u8]) -> Result<i32, Violation> {
    let error = u32_at(head, 0);
    let len = usize::from(u16_at(head, 4));
    let Some(text) = head[6..].get(..len).filter(|_| error != 0) else {
        return Err(format!("sent a malformed chunk of type {kind:#x}"));
    };
    if len > 0 {
        tracing::debug!("the NBD server's message: {}", readable(text));
    }
    match error == ErrorCode::Shutdown as u32 {
        true => Err(SHUTS_DOWN.into()),
        false => Ok(errno(error)),
    }
}

/// Adds one extent descriptor of the context. Extents beyond the request, or beyond the room for
/// them, are dropped.
pub(super) fn describe(
    extents: &mut Extents,
    tells: Tells,
    bytes: &[u8],
    is_extended: bool,
) -> Result<(), Violation> {
    let (len, flags) = match is_extended {
        true => (u64_at(bytes, 0), u64_at(bytes, 8) as u32),
        false => (u32_at(bytes, 0).into(), u32_at(bytes, 4)),
    };
    if len == 0 {
        return Err("sent an extent of 0 bytes".into());
    }
    extents.push(tells.status(flags), len);
    Ok(())
}
