//! The driver's side of a packed virtqueue (virtio 1.2, section 2.8).
//!
//! The caller prepares chains in a private table, which has the format of split queues.
//! [`DriverRing::push`] copies a chain to the ring, where the device sees it at once, as with the
//! drivers of guests. The head of the chain is its buffer id.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::error::Result;
use crate::memory::{GuestMemory, Mapping};
use crate::ring::{Desc, DriverRing, EVENT_LEN, NOT_IN_RING, RingLayout, Used, passes};

/// VIRTQ_DESC_F_AVAIL and VIRTQ_DESC_F_USED in the second word of a descriptor, which is length, id
/// and flags.
const AVAIL: u64 = 1 << 55;
const USED: u64 = 1 << 63;

/// RING_EVENT_FLAGS_ENABLE, DISABLE and DESC.
const ENABLE: u32 = 0;
const DISABLE: u32 = 1;
const AT_DESCRIPTOR: u32 = 2;

/// The base of a ring that has not been used: avail and used index 0, both wrap counters 1.
pub const INITIAL_BASE: u32 = 0x8000_8000;

/// A position in the ring.
#[derive(Clone, Copy, Debug)]
struct Place {
    index: u16,
    wrap: bool,
}

impl Place {
    #[inline(always)]
    fn advance(&mut self, count: u16, size: u16) {
        self.index += count;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }

    fn word(self) -> u32 {
        u32::from(self.index) | u32::from(self.wrap) << 15
    }
}

/// Returns the position of a ring of `size` entries after `count` descriptors, as a base for both
/// directions.
pub fn base_after(count: u64, size: u16) -> u32 {
    let size = u64::from(size);
    let place = Place {
        index: (count % size) as u16,
        wrap: (count / size).is_multiple_of(2),
    };
    place.word() | place.word() << 16
}

/// A packed virtqueue. All pointers stay inside the guest memory passed to `new`, whose owner must
/// outlive the ring.
#[derive(Debug)]
pub struct PackedRing {
    ring: *mut u64,
    driver_event: *mut u32,
    device_event: *mut u32,
    /// The chains, in the format of split queues.
    chains: Mapping,
    size: u16,
    event_idx: bool,
    next_avail: Place,
    next_used: Place,
    /// Number of descriptors added since the last `publish`.
    added: u16,
    /// Index of the descriptor that was popped last.
    popped: u16,
    /// Number of descriptors of each chain that the device has.
    counts: Box<[u16]>,
}

// SAFETY: the pointers refer to shared memory that has no thread affinity. Only one thread at a
// time uses a ring, because its methods that write take `&mut self`.
unsafe impl Send for PackedRing {}

impl PackedRing {
    /// Returns the second word of a descriptor of the ring.
    #[inline(always)]
    fn rest(&self, index: u16) -> &AtomicU64 {
        debug_assert!(index < self.size);
        // SAFETY: inside the ring that `new` checked; only accessed atomically.
        unsafe { AtomicU64::from_ptr(self.ring.add(2 * usize::from(index) + 1)) }
    }

    #[inline(always)]
    fn store_address(&self, index: u16, addr: u64) {
        debug_assert!(index < self.size);
        // SAFETY: as `rest`, for the first word.
        let word = unsafe { AtomicU64::from_ptr(self.ring.add(2 * usize::from(index))) };
        word.store(addr, Ordering::Relaxed);
    }

    fn event(&self, at: *mut u32) -> &AtomicU32 {
        // SAFETY: one of the two structures that `new` placed, only accessed atomically.
        unsafe { AtomicU32::from_ptr(at) }
    }

    fn wish(&self, flags: u32, place: u32) {
        self.event(self.driver_event)
            .store(place | flags << 16, Ordering::Relaxed);
    }

    /// Returns the address, and length, flags and next of a descriptor of a chain.
    #[inline(always)]
    fn prepared(&self, index: u16) -> (u64, u64) {
        debug_assert!(index < self.size);
        let at: *mut u64 = self.chains.base().cast();
        // SAFETY: inside the table, which is written and read by the thread that has the ring.
        unsafe {
            let at = at.add(2 * usize::from(index));
            (at.read_volatile(), at.add(1).read_volatile())
        }
    }
}

impl DriverRing for PackedRing {
    fn new(memory: &GuestMemory, layout: &RingLayout, event_idx: bool) -> Result<PackedRing> {
        assert!(layout.packed);
        let n = usize::from(layout.size);
        let start = Place {
            index: 0,
            wrap: true,
        };
        Ok(PackedRing {
            ring: memory.map().at(layout.desc, 16 * n).cast(),
            driver_event: memory.map().at(layout.avail, EVENT_LEN).cast(),
            device_event: memory.map().at(layout.used, EVENT_LEN).cast(),
            chains: Mapping::anonymous(16 * n)?,
            size: layout.size,
            event_idx,
            next_avail: start,
            next_used: start,
            added: 0,
            popped: 0,
            counts: vec![0; n].into_boxed_slice(),
        })
    }

    fn descriptor(&self, index: u16) -> *mut Desc {
        assert!(index < self.size);
        self.chains.at(16 * usize::from(index), 16).cast()
    }

    #[inline(always)]
    fn push(&mut self, head: u16) {
        let first = self.next_avail;
        let mut place = first;
        let mut first_rest = 0;
        let mut index = head;
        let mut count = 0;
        loop {
            let (addr, tail) = self.prepared(index);
            let owner = if place.wrap { AVAIL } else { USED };
            let len = tail & u64::from(u32::MAX);
            let rest = len | u64::from(head) << 32 | (tail >> 32 & 7) << 48 | owner;
            self.store_address(place.index, addr);
            if count == 0 {
                first_rest = rest;
            } else {
                self.rest(place.index).store(rest, Ordering::Relaxed);
            }
            count += 1;
            place.advance(1, self.size);
            if tail >> 32 & u64::from(Desc::NEXT) == 0 {
                break;
            }
            index = (tail >> 48) as u16;
        }
        // The first descriptor makes the chain available.
        self.rest(first.index).store(first_rest, Ordering::Release);
        self.counts[usize::from(head)] = count;
        self.next_avail = place;
        self.added += count;
    }

    #[inline(always)]
    fn publish(&mut self) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        // The flags must be visible before this side reads whether the device wants a kick. The
        // device performs the opposite accesses.
        fence(Ordering::SeqCst);
        let event = self.event(self.device_event).load(Ordering::Relaxed);
        match event >> 16 & 3 {
            DISABLE => false,
            AT_DESCRIPTOR if self.event_idx => {
                let wrap = event >> 15 & 1 == 1;
                let new = self.next_avail;
                let lap = if wrap == new.wrap { 0 } else { self.size };
                let wanted = (event as u16 & 0x7fff).wrapping_sub(lap);
                passes(wanted, new.index, new.index.wrapping_sub(added))
            }
            _ => true,
        }
    }

    /// The number of completions is not known: each descriptor says whether it is used.
    #[inline(always)]
    fn refresh(&mut self) -> u16 {
        0
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<Used> {
        if !self.is_ready() {
            return None;
        }
        let index = self.next_used.index;
        let rest = self.rest(index).load(Ordering::Acquire);
        let id = (rest >> 32) as u16;
        let count = self.counts.get_mut(usize::from(id)).map(std::mem::take);
        let count = count.unwrap_or(0);
        self.popped = index;
        self.next_used.advance(count, self.size);
        let head = if count > 0 { id.into() } else { NOT_IN_RING };
        Some(Used {
            head,
            len: rest as u32,
        })
    }

    #[inline(always)]
    fn is_ready(&self) -> bool {
        let rest = self.rest(self.next_used.index).load(Ordering::Relaxed);
        let used = if self.next_used.wrap { AVAIL | USED } else { 0 };
        rest & (AVAIL | USED) == used
    }

    fn arm(&mut self) -> bool {
        if self.event_idx {
            self.wish(AT_DESCRIPTOR, self.next_used.word());
        } else {
            self.wish(ENABLE, 0);
        }
        fence(Ordering::SeqCst);
        !self.is_ready()
    }

    fn disarm(&mut self) {
        self.wish(DISABLE, 0);
    }

    fn suppress(&mut self) {
        self.disarm();
    }

    fn last_written(&self, layout: &RingLayout) -> (usize, usize) {
        (layout.desc + 16 * usize::from(self.popped), 16)
    }
}
