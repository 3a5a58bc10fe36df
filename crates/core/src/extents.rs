//! The reply to [`Op::BlockStatus`]: which parts of a disk contain data.

use libc::iovec;

/// Block status of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Status {
    /// No storage is allocated for the range.
    pub hole: bool,
    /// The range reads as zeroes.
    pub zero: bool,
    /// The range has changed since the client last asked, as far as the disk knows.
    pub dirty: bool,
}

impl Status {
    /// Status of a range that contains data and is not dirty.
    pub const DATA: Status = Status {
        hole: false,
        zero: false,
        dirty: false,
    };
    /// Status of a range without storage, which reads as zeroes and is not dirty.
    pub const HOLE: Status = Status {
        hole: true,
        zero: true,
        dirty: false,
    };

    fn flags(self) -> u64 {
        let flag = |is, flag| if is { flag } else { 0 };
        flag(self.hole, HOLE) | flag(self.zero, ZERO) | flag(self.dirty, DIRTY)
    }
}

const HOLE: u64 = 1;
const ZERO: u64 = 2;
const DIRTY: u64 = 4;
const LEN_SHIFT: u32 = 3;

/// Size of one extent in a request's buffer, in bytes.
const WORD: usize = size_of::<u64>();

/// Writes consecutive extents, beginning at the request's offset, into the request's only segment.
///
/// Each extent is a native-endian u64 with length and status. A 0 follows the last extent unless
/// the segment is full. The reply has at least one extent, of at least one byte. The extents may
/// end before the request does, but never extend beyond it.
pub struct Extents {
    next: *mut u8,
    /// Number of further extents for which the segment has room.
    room: usize,
    last: Option<(Status, u64)>,
    /// Number of bytes of the request that no extent describes yet.
    left: u64,
}

impl Extents {
    /// Begins the reply about `len` bytes to a request with these segments. The request must have a
    /// single segment, with room for at least one extent.
    ///
    /// # Safety
    /// The request is in flight, so that its segment is valid, and completes after the last use of
    /// the returned value.
    pub unsafe fn of(segments: &[iovec], len: u64) -> Extents {
        let segment = segments[0];
        let extents = Extents {
            next: segment.iov_base.cast(),
            room: segment.iov_len / WORD,
            last: None,
            left: len,
        };
        // SAFETY: as required of the caller.
        unsafe { extents.next.write_bytes(0, segment.iov_len) };
        extents
    }

    /// Returns the number of bytes of the request that no extent describes yet.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Describes the next `len` bytes. Returns false if the request is fully described or the
    /// segment has no more room.
    pub fn push(&mut self, status: Status, len: u64) -> bool {
        let len = len.min(self.left);
        if len == 0 {
            return false;
        }
        let total = match self.last {
            Some((last, before)) if last == status => before + len,
            _ if self.room == 0 => {
                // No later extent would be adjacent to the last one.
                self.last = None;
                return false;
            }
            last => {
                if last.is_some() {
                    self.next = self.next.wrapping_add(WORD);
                }
                self.room -= 1;
                len
            }
        };
        self.left -= len;
        self.last = Some((status, total));
        // SAFETY: `room` counts what fits into the segment, which is valid as
        // required by `of`.
        unsafe {
            self.next
                .cast::<u64>()
                .write_unaligned(total << LEN_SHIFT | status.flags())
        };
        self.left > 0
    }
}

/// Narrows the reply to a wider request: keeps the `len` bytes after the first `skip`. If the wider
/// reply does not reach these bytes, they are reported as data.
///
/// # Safety
/// The request with these segments has completed, and its source has not read the reply yet.
pub unsafe fn narrow(segments: &[iovec], skip: u64, len: u64) {
    let segment = segments[0];
    // SAFETY: as required of the caller.
    let answer = unsafe { std::slice::from_raw_parts(segment.iov_base.cast(), segment.iov_len) };
    let wide: Vec<_> = extents(answer).collect();
    // SAFETY: as required of the caller.
    let mut narrow = unsafe { Extents::of(segments, len) };
    let mut skip = skip;
    for (status, extent) in wide {
        let skipped = skip.min(extent);
        skip -= skipped;
        narrow.push(status, extent - skipped);
    }
    if narrow.left() == len {
        narrow.push(Status::DATA, len);
    }
}

/// Returns the extents in the buffer of a completed request.
pub fn extents(buffer: &[u8]) -> impl Iterator<Item = (Status, u64)> + '_ {
    let words = buffer.chunks_exact(WORD);
    let words = words.map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes")));
    words.take_while(|word| word >> LEN_SHIFT != 0).map(|word| {
        let status = Status {
            hole: word & HOLE != 0,
            zero: word & ZERO != 0,
            dirty: word & DIRTY != 0,
        };
        (status, word >> LEN_SHIFT)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Slab;
    use fathom_trace::Op;

    fn answer(buffer: &mut [u8], len: u64, pushed: &[(Status, u64)]) -> Vec<(Status, u64)> {
        let mut slab = Slab::default();
        slab.grow(1);
        let id = slab.take().unwrap();
        let request = &mut slab[id];
        (request.op, request.len) = (Op::BlockStatus, len);
        request.segments.push(libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        });
        // SAFETY: the buffer outlives the request.
        let mut out = unsafe { Extents::of(&request.segments, len) };
        for (status, len) in pushed {
            if !out.push(*status, *len) {
                break;
            }
        }
        extents(buffer).collect()
    }

    #[test]
    fn extents_come_back_merged_and_cut_to_the_request() {
        let (data, hole) = (Status::DATA, Status::HOLE);
        let pushed = [(data, 512), (data, 512), (hole, 4096), (data, 1 << 50)];
        let mut buffer = [7; 64];
        let seen = answer(&mut buffer, 1 << 20, &pushed);
        let rest = (1 << 20) - 1024 - 4096;
        assert_eq!(seen, [(data, 1024), (hole, 4096), (data, rest)]);
    }

    #[test]
    fn a_wider_answer_is_cut_to_what_was_asked() {
        let (data, hole) = (Status::DATA, Status::HOLE);
        let narrowed = |pushed: &[(Status, u64)]| {
            let mut buffer = [7; 32];
            answer(&mut buffer, 1536, pushed);
            let segment = libc::iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            };
            // SAFETY: the buffer lives until the test ends.
            unsafe { narrow(&[segment], 100, 1000) };
            extents(&buffer).collect::<Vec<_>>()
        };
        let all = [(hole, 512), (data, 512), (hole, 512)];
        assert_eq!(narrowed(&all), [(hole, 412), (data, 512), (hole, 76)]);
        assert_eq!(narrowed(&[(hole, 1536)]), [(hole, 1000)]);
        assert_eq!(narrowed(&[(data, 100), (hole, 7)]), [(hole, 7)]);
        assert_eq!(narrowed(&[(hole, 50)]), [(data, 1000)]);
    }

    #[test]
    fn what_does_not_fit_is_left_out() {
        let (data, hole) = (Status::DATA, Status::HOLE);
        let pushed = [(data, 1), (hole, 2), (hole, 3), (data, 4)];
        let mut buffer = [7; 16];
        assert_eq!(answer(&mut buffer, 100, &pushed), [(data, 1), (hole, 5)]);
        // Although further extents are pushed.
        let mut one = [7; 8];
        let segment = libc::iovec {
            iov_base: one.as_mut_ptr().cast(),
            iov_len: one.len(),
        };
        // SAFETY: the buffer lives until the test ends.
        let mut out = unsafe { Extents::of(&[segment], 100) };
        for (status, len) in [(hole, 10), (data, 10), (hole, 80)] {
            out.push(status, len);
        }
        assert_eq!(extents(&one).collect::<Vec<_>>(), [(hole, 10)]);
    }
}
