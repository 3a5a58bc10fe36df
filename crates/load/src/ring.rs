//! The driver's side of a split virtqueue (virtio 1.2, section 2.7).
//!
//! Descriptor chains are prepared once by the caller; the ring moves their
//! heads. Heads are pushed without being visible, published together, and come
//! back by [`Ring::pop`] after [`Ring::refresh`] has read the used index once.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use crate::memory::{GuestMemory, Layout, PAGE};

/// VRING_AVAIL_F_NO_INTERRUPT.
const NO_INTERRUPT: u16 = 1;
/// VRING_USED_F_NO_NOTIFY.
const NO_NOTIFY: u16 = 1;

/// `struct virtq_desc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Desc {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

impl Desc {
    /// VIRTQ_DESC_F_NEXT.
    pub const NEXT: u16 = 1;
    /// VIRTQ_DESC_F_WRITE: the device writes.
    pub const WRITE: u16 = 2;
    /// VIRTQ_DESC_F_INDIRECT.
    pub const INDIRECT: u16 = 4;
}

/// Where the three parts lie in guest memory, as offsets.
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    pub size: u16,
    pub desc: usize,
    pub avail: usize,
    pub used: usize,
}

impl RingLayout {
    /// Each part on pages of its own: the two sides write different ones, and
    /// the used ring's pages are those that the dirty log must name.
    pub fn new(layout: &mut Layout, size: u16) -> RingLayout {
        let n = usize::from(size);
        RingLayout {
            size,
            desc: layout.take(16 * n, PAGE),
            avail: layout.take(6 + 2 * n, PAGE),
            used: layout.take(6 + 8 * n, PAGE),
        }
    }

    /// Bytes of the used ring.
    pub fn used_len(&self) -> usize {
        6 + 8 * usize::from(self.size)
    }
}

/// One entry of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub head: u32,
    pub len: u32,
}

/// The ring. All pointers stay inside the guest memory that `new` was given,
/// whose owner must outlive the ring.
#[derive(Debug)]
pub struct Ring {
    desc: *mut Desc,
    avail: *mut u8,
    used: *mut u8,
    mask: u16,
    event_idx: bool,
    /// Next free place in the avail ring.
    next_avail: u16,
    /// The avail index that the device has been shown.
    published: u16,
    /// Next used entry to take.
    next_used: u16,
    /// The device's used index when it was last read.
    seen_used: u16,
}

// SAFETY: the pointers are to shared memory that has no thread affinity, and a
// ring is used by one thread at a time since its methods that write take
// `&mut self`.
unsafe impl Send for Ring {}

/// Whether moving an index from `old` to `new` passes `event` (virtio 1.2,
/// section 2.7.10: the other side asked to be told when it does).
#[inline(always)]
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

impl Ring {
    /// A ring in zeroed memory.
    pub fn new(memory: &GuestMemory, layout: &RingLayout, event_idx: bool) -> Ring {
        assert!(layout.size.is_power_of_two());
        let n = usize::from(layout.size);
        Ring {
            desc: memory.map().at(layout.desc, 16 * n).cast(),
            avail: memory.map().at(layout.avail, 6 + 2 * n),
            used: memory.map().at(layout.used, layout.used_len()),
            mask: layout.size - 1,
            event_idx,
            next_avail: 0,
            published: 0,
            next_used: 0,
            seen_used: 0,
        }
    }

    fn size(&self) -> usize {
        usize::from(self.mask) + 1
    }

    #[inline(always)]
    fn avail_word(&self, index: usize) -> &AtomicU16 {
        debug_assert!(index < 3 + self.size());
        // SAFETY: flags, index, `size` entries and used_event are inside the
        // part that `new` checked; the memory is only accessed atomically.
        unsafe { AtomicU16::from_ptr(self.avail.cast::<u16>().add(index)) }
    }

    #[inline(always)]
    fn used_word(&self, byte: usize) -> &AtomicU16 {
        debug_assert!(byte + 2 <= 6 + 8 * self.size());
        // SAFETY: as `avail_word`, for the used ring.
        unsafe { AtomicU16::from_ptr(self.used.add(byte).cast()) }
    }

    fn used_event(&self) -> &AtomicU16 {
        self.avail_word(2 + self.size())
    }

    fn avail_event(&self) -> &AtomicU16 {
        self.used_word(4 + 8 * self.size())
    }

    /// Descriptor `index` of the ring's own table.
    pub fn descriptor(&self, index: u16) -> *mut Desc {
        assert!(index <= self.mask);
        // SAFETY: inside the table that `new` checked.
        unsafe { self.desc.add(usize::from(index)) }
    }

    /// Queues the chain that starts at `head`; the device does not see it yet.
    /// The caller never has more chains in the ring than it has entries.
    #[inline(always)]
    pub fn push(&mut self, head: u16) {
        let place = 2 + usize::from(self.next_avail & self.mask);
        self.avail_word(place).store(head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Shows the device all that was pushed. True: it has to be kicked.
    #[inline(always)]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_avail);
        if old == new {
            return false;
        }
        self.avail_word(1).store(new, Ordering::Release);
        self.published = new;
        // The index must be out before it is read whether the device sleeps;
        // the device does the reverse.
        fence(Ordering::SeqCst);
        if self.event_idx {
            passes(self.avail_event().load(Ordering::Relaxed), new, old)
        } else {
            self.used_word(0).load(Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    /// Reads the used index; returns how many entries wait to be popped. More
    /// than are in flight means that the device is broken: the caller checks.
    #[inline(always)]
    pub fn refresh(&mut self) -> u16 {
        self.seen_used = self.used_word(2).load(Ordering::Acquire);
        self.seen_used.wrapping_sub(self.next_used)
    }

    /// The next used entry up to what `refresh` saw.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Used> {
        if self.next_used == self.seen_used {
            return None;
        }
        let at = 4 + 8 * usize::from(self.next_used & self.mask);
        self.next_used = self.next_used.wrapping_add(1);
        // SAFETY: an entry of the used ring, inside the part that `new`
        // checked; its two words are read atomically, each once.
        let (head, len) = unsafe {
            (
                AtomicU32::from_ptr(self.used.add(at).cast()),
                AtomicU32::from_ptr(self.used.add(at + 4).cast()),
            )
        };
        Some(Used {
            head: head.load(Ordering::Relaxed),
            len: len.load(Ordering::Relaxed),
        })
    }

    /// Whether the device has finished something that was not popped.
    #[inline(always)]
    pub fn is_ready(&self) -> bool {
        self.used_word(2).load(Ordering::Relaxed) != self.next_used
    }

    /// Asks for an interrupt at the next completion. False: there is one
    /// already, for which none may come; do not sleep.
    pub fn arm(&mut self) -> bool {
        if self.event_idx {
            self.used_event().store(self.next_used, Ordering::Relaxed);
        } else {
            self.avail_word(0).store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        !self.is_ready()
    }

    /// After a sleep: no interrupts until [`Ring::arm`]. With EVENT_IDX the
    /// event that was asked for lies behind, which has the same effect.
    pub fn disarm(&mut self) {
        if !self.event_idx {
            self.avail_word(0).store(NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    /// For a driver that polls: no interrupts at all. With EVENT_IDX there is
    /// no such state; the event is the farthest possible, one per 65536.
    pub fn suppress(&mut self) {
        self.disarm();
        if self.event_idx {
            let behind = self.next_used.wrapping_sub(1);
            self.used_event().store(behind, Ordering::Relaxed);
        }
    }
}

/// Reads the device's used index out of guest memory: where a server that lost
/// its state has to go on.
pub fn used_index(memory: &GuestMemory, layout: &RingLayout) -> u16 {
    let at = memory.map().at(layout.used + 2, 2);
    // SAFETY: inside the mapping, aligned, and only accessed atomically.
    unsafe { AtomicU16::from_ptr(at.cast()) }.load(Ordering::Acquire)
}
