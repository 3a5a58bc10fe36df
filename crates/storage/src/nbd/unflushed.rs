//! Keeps writes that the server has confirmed but may not have made durable. If the server is lost,
//! they are sent again after reconnecting.

use fathom_core::{Op, Request};
use libc::iovec;
use std::collections::VecDeque;

/// Bytes of data that one channel can keep; the memory is used on demand.
const ROOM: usize = 64 << 20;
/// Longest write in bytes that is kept. Longer writes are followed by a flush each.
pub(super) const LONGEST: u64 = 8 << 20;
/// Maximum number of ranges that one channel keeps.
const MOST: usize = 64 << 10;

/// A write, write zeroes or discard.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Position among the writes of all channels.
    sequence: u64,
    /// Number of the first flush that makes the write durable.
    mark: u64,
    op: Op,
    unmap: bool,
    at: u64,
    len: u64,
    /// Offset of its data in the ring.
    start: usize,
}

/// A kept write, to be sent again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept<'a> {
    pub(super) sequence: u64,
    pub(super) op: Op,
    pub(super) unmap: bool,
    pub(super) at: u64,
    pub(super) len: u64,
    /// Data of a write; empty for other operations.
    pub(super) data: &'a [u8],
}

/// The kept writes of one channel, in the order of their completion.
#[derive(Default)]
pub(super) struct Unflushed {
    entries: VecDeque<Entry>,
    /// Ring buffer of the data; empty until there is data.
    ring: Box<[u8]>,
    /// Offset of the oldest data, or an earlier offset.
    head: usize,
    /// Offset behind the newest data.
    tail: usize,
    bytes: usize,
}

impl Unflushed {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns whether it is time for a flush.
    #[inline]
    pub(super) fn is_half_full(&self) -> bool {
        self.bytes > ROOM / 2 || self.entries.len() > MOST / 2
    }

    /// Keeps a completed request. Returns false if there is no room; a flush makes some.
    ///
    /// # Safety
    /// The request is in flight, so that its segments are valid. The request is at most [`LONGEST`]
    /// bytes long.
    pub(super) unsafe fn keep(&mut self, request: &Request, sequence: u64, mark: u64) -> bool {
        let data = match request.op {
            Op::Write => request.len as usize,
            _ => 0,
        };
        let Some(start) = self.place(data) else {
            return false;
        };
        if data > 0 {
            // SAFETY: as required of the caller; the ring is not part of the request's memory.
            unsafe { copy_in(&request.segments, &mut self.ring[start..start + data]) };
            self.tail = start + data;
            self.bytes += data;
        }
        self.entries.push_back(Entry {
            sequence,
            mark,
            op: request.op,
            unmap: request.unmap,
            at: request.at,
            len: request.len,
            start,
        });
        true
    }

    /// Returns the offset of `len` contiguous free bytes.
    fn place(&mut self, len: usize) -> Option<usize> {
        if self.entries.len() == MOST {
            return None;
        }
        if len > 0 && self.ring.is_empty() {
            self.ring = vec![0; ROOM].into();
        }
        if self.bytes == 0 {
            (self.head, self.tail) = (0, 0);
            return (len <= ROOM).then_some(0);
        }
        match (self.tail > self.head, len) {
            (_, 0) => Some(self.tail),
            (true, len) if ROOM - self.tail >= len => Some(self.tail),
            (true, len) => (len <= self.head).then_some(0),
            (false, len) => (self.head - self.tail >= len).then_some(self.tail),
        }
    }

    /// Removes the writes that this flush, or an earlier one, has made durable.
    pub(super) fn trim(&mut self, flush: u64) {
        while let Some(entry) = self.entries.front().filter(|entry| entry.mark <= flush) {
            if entry.op == Op::Write {
                self.bytes -= entry.len as usize;
                self.head = entry.start + entry.len as usize;
            }
            self.entries.pop_front();
        }
    }

    pub(super) fn kept(&self) -> impl Iterator<Item = Kept<'_>> {
        self.entries.iter().map(|entry| Kept {
            sequence: entry.sequence,
            op: entry.op,
            unmap: entry.unmap,
            at: entry.at,
            len: entry.len,
            data: match entry.op {
                Op::Write => &self.ring[entry.start..entry.start + entry.len as usize],
                _ => &[],
            },
        })
    }
}

/// # Safety
/// The segments are valid for reading, and their lengths add up to that of `to`.
unsafe fn copy_in(segments: &[iovec], mut to: &mut [u8]) {
    for segment in segments {
        let (now, later) = to.split_at_mut(segment.iov_len.min(to.len()));
        // SAFETY: the caller vouches for the segment. (A guest may be changing it; such a guest
        // cannot know what it has written either.)
        unsafe {
            let from = segment.iov_base.cast::<u8>();
            from.copy_to_nonoverlapping(now.as_mut_ptr(), now.len());
        }
        to = later;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Makes it a request of `len` bytes, all of them `fill`.
    fn fill(request: &mut Request, op: Op, at: u64, len: usize, fill: u8) -> Vec<u8> {
        let mut data = vec![fill; len];
        (request.op, request.at, request.len) = (op, at, len as u64);
        request.segments.clear();
        let (first, second) = data.split_at_mut(len / 3);
        for part in [first, second] {
            request.segments.push(iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: part.len(),
            });
        }
        data
    }

    /// Keeps a range without data across a trim, and then more data than there is room for.
    #[test]
    fn what_is_kept_is_not_written_over() {
        let mut slab = fathom_core::Slab::default();
        slab.grow(1);
        let id = slab.take().expect("grown");
        let mut log = Unflushed::default();
        let mut keep = |log: &mut Unflushed, op, n: u64, len, mark| {
            let _data = fill(&mut slab[id], op, n, len, n as u8);
            // SAFETY: the data lives until the call returns.
            unsafe { log.keep(&slab[id], n, mark) }
        };
        assert!(keep(&mut log, Op::Write, 0, 4096, 1));
        assert!(keep(&mut log, Op::Discard, 1, 4096, 2));
        log.trim(1);
        let n = (ROOM >> 20) as u64;
        assert!((0..n).all(|at| keep(&mut log, Op::Write, at, 1 << 20, 2)));
        assert!(!keep(&mut log, Op::Write, 99, 4096, 2), "there is no room");
        let is_whole = |kept: Kept<'_>| kept.data.iter().all(|byte| *byte == kept.at as u8);
        assert!(log.kept().all(is_whole));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// After any sequence of keeping and trimming, the remaining writes are complete and in
        /// order.
        #[test]
        fn it_gives_back_what_was_kept(
            steps in prop::collection::vec((1..LONGEST as usize, 0..4u8), 1..90)
        ) {
            let mut slab = fathom_core::Slab::default();
            slab.grow(1);
            let id = slab.take().expect("grown");
            let mut log = Unflushed::default();
            let mut expected: VecDeque<(u64, usize)> = VecDeque::new();
            for (n, (len, what)) in steps.into_iter().enumerate() {
                let n = n as u64;
                let (op, flushes) = ([Op::Write, Op::Discard][usize::from(what == 0)], what == 1);
                let _data = fill(&mut slab[id], op, n, len, n as u8);
                // SAFETY: the data lives until the call returns.
                if unsafe { log.keep(&slab[id], n, n) } {
                    expected.push_back((n, if op == Op::Write { len } else { 0 }));
                } else {
                    prop_assert!(log.is_half_full());
                }
                if flushes {
                    let upto = n.saturating_sub(3);
                    log.trim(upto);
                    expected.retain(|(n, _)| *n > upto);
                }
                let kept = log.kept().map(|kept| (kept.sequence, kept.data.len()));
                prop_assert!(kept.eq(expected.iter().copied()));
                let is_whole = |kept: Kept<'_>| kept.data.iter().all(|byte| *byte == kept.at as u8);
                prop_assert!(log.kept().all(is_whole));
            }
        }
    }
}
