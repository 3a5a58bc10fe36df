//! One request, and the slab in which a worker keeps those in flight.

use fathom_trace::{Op, Stamps};
use libc::iovec;
use smallvec::SmallVec;
use std::ops::{Index, IndexMut};

/// Most requests have few segments; more spill to the heap once and the
/// slot keeps that allocation for its next requests.
pub const INLINE_SEGMENTS: usize = 4;

/// Where a request's data lies: host addresses of guest memory, or of a
/// pooled buffer.
pub type Segments = SmallVec<[iovec; INLINE_SEGMENTS]>;

/// What a source asks of a disk. The source has checked it: `offset + len`
/// lies within the disk, both are multiples of 512, and for reads and writes
/// the segments add up to `len`.
#[repr(align(64))]
pub struct Request {
    pub stamps: Stamps,
    pub op: Op,
    /// Writes, discards and write zeroes: durable before completion.
    pub fua: bool,
    /// Write zeroes: the range may be deallocated.
    pub unmap: bool,
    /// Seen by polling rather than by a kick (for the trace).
    pub polled: bool,
    /// Which of the worker's sources answers it.
    pub source: u16,
    /// The queue's number on the disk (for the trace).
    pub queue: u16,
    /// The source's own index of this request (a virtqueue's head).
    pub tag: u16,
    /// 0, or the positive errno it failed with.
    pub error: i32,
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// Bytes to move (or to flush, discard, zero).
    pub len: u64,
    /// The source's: a virtqueue keeps the status byte's address here.
    pub cookie: u64,
    pub segments: Segments,
}

impl Request {
    fn new() -> Request {
        Request {
            stamps: Stamps::default(),
            op: Op::Read,
            fua: false,
            unmap: false,
            polled: false,
            source: 0,
            queue: 0,
            tag: 0,
            error: 0,
            offset: 0,
            len: 0,
            cookie: 0,
            segments: Segments::new(),
        }
    }
}

/// A request's index in its worker's slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u32);

/// A worker's requests in flight. It grows when a source attaches, by the
/// number that the source may have in flight, so that taking a slot neither
/// fails nor allocates.
#[derive(Default)]
pub struct Slab {
    slots: Vec<Request>,
    free: Vec<RequestId>,
}

impl Slab {
    /// Make room for `n` more requests in flight.
    pub fn grow(&mut self, n: usize) {
        let first = self.slots.len();
        self.slots.extend((0..n).map(|_| Request::new()));
        self.free.reserve(self.slots.len());
        self.free
            .extend((first..first + n).rev().map(|i| RequestId(i as u32)));
    }

    /// Number of requests that there is room for.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// A free slot, its fields as its last request left them. None only when
    /// a source exceeds the number that it attached with.
    #[inline]
    pub fn take(&mut self) -> Option<RequestId> {
        self.free.pop()
    }

    /// Give a slot back; its request has been answered, or never was one.
    #[inline]
    pub fn put(&mut self, id: RequestId) {
        debug_assert!(!self.free.contains(&id));
        self.free.push(id);
    }
}

impl Index<RequestId> for Slab {
    type Output = Request;

    #[inline]
    fn index(&self, id: RequestId) -> &Request {
        &self.slots[id.0 as usize]
    }
}

impl IndexMut<RequestId> for Slab {
    #[inline]
    fn index_mut(&mut self, id: RequestId) -> &mut Request {
        &mut self.slots[id.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_hands_out_each_slot_once() {
        let mut slab = Slab::default();
        slab.grow(2);
        slab.grow(1);
        let ids: Vec<_> = std::iter::from_fn(|| slab.take()).collect();
        assert_eq!(ids.len(), 3);
        assert!(
            ids.iter()
                .all(|a| ids.iter().filter(|b| a == *b).count() == 1)
        );
        slab.put(ids[1]);
        assert_eq!(slab.take(), Some(ids[1]));
        assert_eq!(slab.take(), None);
    }
}
