//! A request, and the slab in which a worker keeps its requests in flight.

use fathom_trace::{Op, Stamps, Wire};
use libc::iovec;
use smallvec::SmallVec;
use std::ops::{Index, IndexMut};

/// Number of segments stored inline. Most requests have few segments. More segments need a heap
/// allocation, which the slot keeps for its next requests.
pub const INLINE_SEGMENTS: usize = 4;

/// Location of a request's data: host addresses of guest memory or of a pooled buffer.
pub type Segments = SmallVec<[iovec; INLINE_SEGMENTS]>;

/// The owner of a request. Most requests belong to a source. A layer of the channel may create
/// requests itself, to do a part of the work of others. Sources do not know these *children*, and
/// the layer gets them back (see [`Cx::child_done`]).
///
/// [`Cx::child_done`]: crate::Cx::child_done
///
/// Owners are ordered: layers below come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner(u16);

impl Owner {
    /// The source from which the request came: the owner of all requests that are not children.
    pub const SOURCE: Owner = Owner(0);

    /// Returns the `n`th layer with children, counting from 1; none if `n` is too large.
    pub(crate) fn layer(n: usize) -> Option<Owner> {
        u16::try_from(n).ok().map(Owner)
    }

    #[inline]
    pub(crate) fn index(self) -> Option<usize> {
        usize::from(self.0).checked_sub(1)
    }
}

/// A source's request to a disk. The source has checked that `offset + len` lies within the disk
/// and that both are multiples of 512, except for disks that accept other values. The segments of
/// reads and writes add up to `len`.
#[repr(align(64))]
pub struct Request {
    /// Times spent in each stage so far, in ticks of the clock.
    pub stamps: Stamps,
    /// Operation of the request.
    pub op: Op,
    /// For writes, discards and write zeroes: must be durable before it completes.
    pub fua: bool,
    /// For write zeroes: the range may be deallocated.
    pub unmap: bool,
    /// Found by polling rather than by a kick (for the trace).
    pub polled: bool,
    /// Slot of the worker's source that answers the request.
    pub source: u16,
    /// Number of the virtqueue on the disk, or of the NBD connection on the server (for the trace).
    pub queue: u16,
    /// Owner that gets the request back when it is done.
    pub owner: Owner,
    /// Private state of the disk's channel while the request is in flight. At most one layer uses
    /// it.
    pub memo: [u8; 2],
    /// The source's own index of the request (a virtqueue's head).
    pub tag: u16,
    /// 0, or the positive errno with which the request failed.
    pub error: i32,
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// Offset in the storage that gets the request, in bytes. Equals `offset` unless an image
    /// format maps it elsewhere.
    pub at: u64,
    /// Number of bytes to read, write, flush, discard or zero.
    pub len: u64,
    /// Private to the source: a virtqueue stores the address of the status byte here.
    pub cookie: u64,
    /// Identifier of the request on another host (for the trace).
    pub wire: Wire,
    /// Memory of the data, or of the reply to [`Op::BlockStatus`]. Empty for operations without
    /// data.
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
    /// The id of no request; the slab never grows to this index.
    pub const NOBODY: RequestId = RequestId(u32::MAX);
}

/// Number of requests per allocation.
const CHUNK: usize = 128;

/// A worker's requests in flight. The slab grows when a source attaches, by at least the number of
/// requests that the source may have in flight. Taking a slot therefore neither fails nor
/// allocates. A slot never moves, because the kernel may read a request's segments while the slab
/// grows.
#[derive(Default)]
pub struct Slab {
    chunks: Vec<Box<[Request]>>,
    free: Vec<RequestId>,
}

impl Slab {
    /// Makes room for `n` more requests in flight.
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

    /// Returns the number of slots.
    pub fn capacity(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Takes a free slot, whose fields keep the values of its last request. Returns none only if a
    /// source exceeds the number of requests with which it attached.
    #[inline]
    pub fn take(&mut self) -> Option<RequestId> {
        self.free.pop()
    }

    /// Returns the slots in use. Slow.
    pub(crate) fn in_use(&self) -> Vec<RequestId> {
        let mut free = vec![false; self.capacity()];
        self.free.iter().for_each(|id| free[id.0 as usize] = true);
        let ids = (0..).zip(&free).filter(|(_, free)| !**free);
        ids.map(|(id, _)| RequestId(id)).collect()
    }

    /// Releases a slot whose request has been answered or was never started.
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
