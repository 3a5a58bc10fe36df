//! One request, and the slab in which a worker keeps those in flight.

use fathom_trace::{Op, Stamps, Wire};
use libc::iovec;
use smallvec::SmallVec;
use std::ops::{Index, IndexMut};

/// Most requests have few segments; more spill to the heap once and the
/// slot keeps that allocation for its next requests.
pub const INLINE_SEGMENTS: usize = 4;

/// Where a request's data lies: host addresses of guest memory, or of a
/// pooled buffer.
pub type Segments = SmallVec<[iovec; INLINE_SEGMENTS]>;

/// Whose a request is. Most are a source's. A layer of the channel may make
/// some itself, to do a part of other requests' work: *children*, which no
/// source knows and which that layer gets back (see [`Cx::child_done`]).
///
/// [`Cx::child_done`]: crate::Cx::child_done
///
/// Owners are ordered: layers below come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner(u16);

impl Owner {
    pub const SOURCE: Owner = Owner(0);

    /// The `n`th layer that has children, from 1. None: no channel has so many.
    pub(crate) fn layer(n: usize) -> Option<Owner> {
        u16::try_from(n).ok().map(Owner)
    }

    #[inline]
    pub(crate) fn index(self) -> Option<usize> {
        usize::from(self.0).checked_sub(1)
    }
}

/// What a source asks of a disk. The source has checked it: `offset + len`
/// lies within the disk, both are multiples of 512 (but for a disk that is
/// said to take others), and for reads and writes the segments add up to
/// `len`.
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
    /// Who gets it back when it is done.
    pub owner: Owner,
    /// What the disk's channel has to remember of it until it is done. One of
    /// its layers uses this at most, and nobody else looks at it.
    pub memo: [u8; 2],
    /// The source's own index of this request (a virtqueue's head).
    pub tag: u16,
    /// 0, or the positive errno it failed with.
    pub error: i32,
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// Where that is in the storage that the request is given to: the same,
    /// unless an image format has put it elsewhere.
    pub at: u64,
    /// Bytes to move (or to flush, discard, zero).
    pub len: u64,
    /// The source's: a virtqueue keeps the status byte's address here.
    pub cookie: u64,
    /// What another host knows it by (for the trace).
    pub wire: Wire,
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
            owner: Owner::SOURCE,
            memo: [0; 2],
            tag: 0,
            error: 0,
            offset: 0,
            at: 0,
            len: 0,
            cookie: 0,
            wire: Wire::None,
            segments: Segments::new(),
        }
    }
}

/// A request's index in its worker's slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u32);

impl RequestId {
    /// No request's id: the slab never grows to it.
    pub const NOBODY: RequestId = RequestId(u32::MAX);
}

/// Requests of one allocation.
const CHUNK: usize = 128;

/// A worker's requests in flight. It grows when a source attaches, by at
/// least the number that the source may have in flight, so that taking a slot
/// neither fails nor allocates. A slot never moves: the kernel may be reading
/// the segments of a request while the slab grows.
#[derive(Default)]
pub struct Slab {
    chunks: Vec<Box<[Request]>>,
    free: Vec<RequestId>,
}

impl Slab {
    /// Make room for `n` more requests in flight.
    pub fn grow(&mut self, n: usize) {
        for _ in 0..n.div_ceil(CHUNK) {
            let first = self.capacity();
            let chunk = std::iter::repeat_with(Request::new).take(CHUNK);
            self.chunks.push(chunk.collect());
            self.free.reserve(self.capacity());
            self.free
                .extend((first..first + CHUNK).rev().map(|i| RequestId(i as u32)));
        }
    }

    /// Number of requests that there is room for.
    pub fn capacity(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// A free slot, its fields as its last request left them. None only when
    /// a source exceeds the number that it attached with.
    #[inline]
    pub fn take(&mut self) -> Option<RequestId> {
        self.free.pop()
    }

    /// Those that are taken. It takes its time.
    pub(crate) fn in_use(&self) -> Vec<RequestId> {
        let mut free = vec![false; self.capacity()];
        self.free.iter().for_each(|id| free[id.0 as usize] = true);
        let ids = (0..).zip(&free).filter(|(_, free)| !**free);
        ids.map(|(id, _)| RequestId(id)).collect()
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
        &self.chunks[id.0 as usize / CHUNK][id.0 as usize % CHUNK]
    }
}

impl IndexMut<RequestId> for Slab {
    #[inline]
    fn index_mut(&mut self, id: RequestId) -> &mut Request {
        &mut self.chunks[id.0 as usize / CHUNK][id.0 as usize % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_hands_out_each_slot_once() {
        let mut slab = Slab::default();
        slab.grow(2);
        slab.grow(CHUNK + 1);
        assert_eq!(slab.capacity(), 3 * CHUNK);
        let mut ids: Vec<_> = std::iter::from_fn(|| slab.take()).collect();
        ids.sort_by_key(|id| id.0);
        ids.dedup();
        assert_eq!(ids.len(), slab.capacity());
        slab.put(ids[1]);
        assert_eq!(slab.take(), Some(ids[1]));
        assert_eq!(slab.take(), None);
    }

    #[test]
    fn a_slot_stays_where_it_is() {
        let mut slab = Slab::default();
        slab.grow(1);
        let id = slab.take().unwrap();
        let before = slab[id].segments.as_ptr();
        slab.grow(10 * CHUNK);
        assert_eq!(slab[id].segments.as_ptr(), before);
    }
}
