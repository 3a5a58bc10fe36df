//! Requests of the kernel on their way through the disk.

use fathom_core::extents::extents;
use fathom_core::{AlignedBuffer, Op};
use fuser::{Errno, ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite};
use std::ops::Range;

/// Maximum length of a read or write, in bytes. The kernel divides longer ones.
pub(super) const MAX_LEN: usize = 256 << 10;

/// Room for the extents of one block status request, in bytes.
pub(super) const STATUS_LEN: usize = 16 << 10;

/// A request to the disk, with its buffer of [`MAX_LEN`] bytes.
pub(super) struct Task {
    pub op: Op,
    pub offset: u64,
    pub len: u64,
    /// Whether write zeroes may deallocate the range.
    pub unmap: bool,
    pub buffer: AlignedBuffer,
    pub then: Then,
}

/// The reply to a request, and the work that precedes it.
pub(super) enum Then {
    Read(ReplyData),
    Write(ReplyWrite),
    Flush(ReplyEmpty),
    /// The zeroes are written in pieces of at most `piece` bytes. `rest` follows the request.
    Zero {
        reply: ReplyEmpty,
        rest: Range<u64>,
        piece: u64,
    },
    /// Looks for data or a hole up to `end`, the size of the disk.
    Seek {
        reply: ReplyLseek,
        wanted: Wanted,
        end: u64,
    },
}

/// The kind of range that lseek(2) looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Data,
    Hole,
}

impl Then {
    /// Sends an error.
    pub(super) fn fail(self, errno: Errno) {
        match self {
            Then::Read(reply) => reply.error(errno),
            Then::Write(reply) => reply.error(errno),
            Then::Flush(reply) | Then::Zero { reply, .. } => reply.error(errno),
            Then::Seek { reply, .. } => reply.error(errno),
        }
    }
}

/// The state of a task when the disk has completed its request.
pub(super) enum Progress {
    /// The reply has been sent. The buffer is free again.
    Done(AlignedBuffer),
    /// The disk must do one more request.
    Next(Task),
}

impl Task {
    /// Sends the reply, or returns the next request. `errno`: 0, or the positive errno of the
    /// failure.
    pub(super) fn completed(self, errno: i32) -> Progress {
        if errno != 0 {
            self.then.fail(Errno::from_i32(errno));
            return Progress::Done(self.buffer);
        }
        match self.then {
            Then::Read(reply) => reply.data(&self.buffer.bytes()[..self.len as usize]),
            Then::Write(reply) => reply.written(self.len as u32),
            Then::Flush(reply) => reply.ok(),
            Then::Zero { reply, rest, piece } => {
                if rest.is_empty() {
                    reply.ok();
                    return Progress::Done(self.buffer);
                }
                let len = piece.min(rest.end - rest.start);
                return Progress::Next(Task {
                    offset: rest.start,
                    len,
                    then: Then::Zero {
                        reply,
                        rest: rest.start + len..rest.end,
                        piece,
                    },
                    ..self
                });
            }
            Then::Seek { reply, wanted, end } => {
                let status = &self.buffer.bytes()[..STATUS_LEN];
                match find(status, wanted, self.offset) {
                    Found::At(at) => reply.offset(at as i64),
                    Found::NotBefore(at) if at < end => {
                        return Progress::Next(Task {
                            offset: at,
                            len: end - at,
                            then: Then::Seek { reply, wanted, end },
                            ..self
                        });
                    }
                    // The end of a file is a hole.
                    Found::NotBefore(_) if wanted == Wanted::Hole => reply.offset(end as i64),
                    Found::NotBefore(_) => reply.error(Errno::ENXIO),
                }
            }
        }
        Progress::Done(self.buffer)
    }
}

/// The result of a search in the extents of one block status request.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    At(u64),
    /// Not found before this offset.
    NotBefore(u64),
}

/// Looks for data or a hole in the extents that begin at `offset`. A range that reads as zeroes is
/// a hole.
fn find(status: &[u8], wanted: Wanted, offset: u64) -> Found {
    let mut at = offset;
    for (status, len) in extents(status) {
        let kind = if status.zero {
            Wanted::Hole
        } else {
            Wanted::Data
        };
        if kind == wanted {
            return Found::At(at);
        }
        at += len;
    }
    Found::NotBefore(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_core::{Extents, Status};
    use libc::iovec;

    /// Returns the reply of a block status request with these extents.
    fn status(extents: &[(Status, u64)]) -> AlignedBuffer {
        let mut buffer = AlignedBuffer::new(64);
        let segment = iovec {
            iov_base: buffer.bytes_mut().as_mut_ptr().cast(),
            iov_len: 64,
        };
        // SAFETY: the buffer outlives the writer of the extents.
        let mut writer = unsafe { Extents::of(&[segment], 4096) };
        extents.iter().for_each(|(status, len)| {
            writer.push(*status, *len);
        });
        buffer
    }

    #[test]
    fn zeroes_are_holes() {
        let zeroes = Status {
            hole: false,
            ..Status::HOLE
        };
        let mixed = status(&[(Status::DATA, 512), (Status::HOLE, 1024), (zeroes, 512)]);
        assert_eq!(find(mixed.bytes(), Wanted::Data, 100), Found::At(100));
        assert_eq!(find(mixed.bytes(), Wanted::Hole, 100), Found::At(612));
        let hole = status(&[(Status::HOLE, 1024)]);
        assert_eq!(
            find(hole.bytes(), Wanted::Data, 100),
            Found::NotBefore(1124)
        );
        assert_eq!(find(hole.bytes(), Wanted::Hole, 100), Found::At(100));
    }
}
