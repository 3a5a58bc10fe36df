//! The driver's side of a split virtqueue (virtio 1.2, section 2.7), and the interface that it
//! shares with the packed one.
//!
//! The caller prepares descriptor chains once, and the ring transfers their heads.
//! [`DriverRing::push`] queues a head, and [`DriverRing::publish`] makes all queued heads visible
//! to the device. [`DriverRing::refresh`] reads the used index once, and [`DriverRing::pop`]
//! returns used entries up to it.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use crate::error::Result;
use crate::memory::{GuestMemory, Layout, PAGE};

/// VRING_AVAIL_F_NO_INTERRUPT.
const NO_INTERRUPT: u16 = 1;
/// VRING_USED_F_NO_NOTIFY.
const NO_NOTIFY: u16 = 1;

/// Size in bytes of an event suppression structure of a packed ring.
pub const EVENT_LEN: usize = 4;

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
    /// VIRTQ_DESC_F_WRITE: the device writes to the buffer.
    pub const WRITE: u16 = 2;
    /// VIRTQ_DESC_F_INDIRECT.
    pub const INDIRECT: u16 = 4;
}

/// Offsets in guest memory of the three parts of a ring.
///
/// A packed ring has its descriptor ring at `desc`, the driver's event suppression at `avail` and
/// the device's at `used`.
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    pub size: u16,
    pub packed: bool,
    pub desc: usize,
    pub avail: usize,
    pub used: usize,
}

impl RingLayout {
    /// Places each part on pages of its own. The driver and the device write to different parts,
    /// and the dirty log must mark only the pages of the used ring.
    pub fn new(layout: &mut Layout, size: u16, packed: bool) -> RingLayout {
        let n = usize::from(size);
        let (avail, used) = match packed {
            true => (EVENT_LEN, EVENT_LEN),
            false => (6 + 2 * n, 6 + 8 * n),
        };
        RingLayout {
            size,
            packed,
            desc: layout.take(16 * n, PAGE),
            avail: layout.take(avail, PAGE),
            used: layout.take(used, PAGE),
        }
    }

    /// Returns the size of the used ring in bytes.
    pub fn used_len(&self) -> usize {
        6 + 8 * usize::from(self.size)
    }
}

/// An entry of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub head: u32,
    pub len: u32,
}

/// The driver's side of a virtqueue.
pub trait DriverRing: Send + std::fmt::Debug + Sized {
    /// Creates a ring in zeroed memory.
    fn new(memory: &GuestMemory, layout: &RingLayout, event_idx: bool) -> Result<Self>;

    /// Returns the address of descriptor `index` of the table from which `push` takes chains.
    fn descriptor(&self, index: u16) -> *mut Desc;

    /// Adds the chain that starts at `head`. The device may see it from now on. The caller must not
    /// have more chains in the ring than it has entries.
    fn push(&mut self, head: u16);

    /// Makes all chains that were added visible to the device. Returns whether the device must be
    /// kicked.
    fn publish(&mut self) -> bool;

    /// Looks for completions, and returns their number as far as it is known. The caller must check
    /// the number: more entries than requests in flight mean a broken device.
    fn refresh(&mut self) -> u16;

    /// Returns the next used entry.
    fn pop(&mut self) -> Option<Used>;

    /// Returns whether the device has completed a request that was not popped yet.
    fn is_ready(&self) -> bool;

    /// Requests an interrupt at the next completion. Returns `false` if there is already a
    /// completion: it may cause no interrupt, so the caller must not sleep.
    fn arm(&mut self) -> bool;

    /// Disables interrupts until [`DriverRing::arm`].
    fn disarm(&mut self);

    /// Disables interrupts for a polling driver, as far as the ring can.
    fn suppress(&mut self);

    /// Returns offset and length in guest memory of what the device wrote for the entry that was
    /// popped last.
    fn last_written(&self, layout: &RingLayout) -> (usize, usize);
}

/// Head of a used entry whose chain the device does not have.
pub const NOT_IN_RING: u32 = u32::MAX;

/// A split virtqueue. All pointers stay inside the guest memory passed to `new`, whose owner must
/// outlive the ring.
#[derive(Debug)]
pub struct Ring {
    desc: *mut Desc,
    avail: *mut u8,
    used: *mut u8,
    mask: u16,
    event_idx: bool,
    /// Index of the next free entry in the avail ring.
    next_avail: u16,
    /// The avail index that is visible to the device.
    published: u16,
    /// Index of the next used entry to pop.
    next_used: u16,
    /// The device's used index, as last read.
    seen_used: u16,
}

// SAFETY: the pointers refer to shared memory that has no thread affinity. Only one thread at a
// time uses a ring, because its methods that write take `&mut self`.
unsafe impl Send for Ring {}

/// Returns whether moving an index from `old` to `new` passes `event`, which means that the other
/// side wants a notification (virtio 1.2, section 2.7.10).
#[inline(always)]
pub fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

impl Ring {
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
}

impl DriverRing for Ring {
    fn new(memory: &GuestMemory, layout: &RingLayout, event_idx: bool) -> Result<Ring> {
        assert!(layout.size.is_power_of_two() && !layout.packed);
        let n = usize::from(layout.size);
        Ok(Ring {
            desc: memory.map().at(layout.desc, 16 * n).cast(),
            avail: memory.map().at(layout.avail, 6 + 2 * n),
            used: memory.map().at(layout.used, layout.used_len()),
            mask: layout.size - 1,
            event_idx,
            next_avail: 0,
            published: 0,
            next_used: 0,
            seen_used: 0,
        })
    }

    fn descriptor(&self, index: u16) -> *mut Desc {
        assert!(index <= self.mask);
        // SAFETY: inside the table that `new` checked.
        unsafe { self.desc.add(usize::from(index)) }
    }

    #[inline(always)]
    fn push(&mut self, head: u16) {
        let place = 2 + usize::from(self.next_avail & self.mask);
        self.avail_word(place).store(head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    #[inline(always)]
    fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_avail);
        if old == new {
            return false;
        }
        self.avail_word(1).store(new, Ordering::Release);
        self.published = new;
        // The index must be visible before this side reads whether the device wants a kick. The
        // device performs the opposite accesses.
        fence(Ordering::SeqCst);
        if self.event_idx {
            passes(self.avail_event().load(Ordering::Relaxed), new, old)
        } else {
            self.used_word(0).load(Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    /// Reads the used index, and returns the number of entries that can be popped.
    #[inline(always)]
    fn refresh(&mut self) -> u16 {
        self.seen_used = self.used_word(2).load(Ordering::Acquire);
        self.seen_used.wrapping_sub(self.next_used)
    }

    /// Returns the next used entry, up to the used index that `refresh` read.
    #[inline(always)]
    fn pop(&mut self) -> Option<Used> {
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

    #[inline(always)]
    fn is_ready(&self) -> bool {
        self.used_word(2).load(Ordering::Relaxed) != self.next_used
    }

    fn arm(&mut self) -> bool {
        if self.event_idx {
            self.used_event().store(self.next_used, Ordering::Relaxed);
        } else {
            self.avail_word(0).store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        !self.is_ready()
    }

    /// Disables interrupts. With EVENT_IDX nothing has to be written: the used
    /// index has passed the requested event already.
    fn disarm(&mut self) {
        if !self.event_idx {
            self.avail_word(0).store(NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    /// Disables interrupts for a polling driver. EVENT_IDX cannot disable them completely: the most
    /// distant event is requested, which causes one interrupt per 65536 completions.
    fn suppress(&mut self) {
        self.disarm();
        if self.event_idx {
            let behind = self.next_used.wrapping_sub(1);
            self.used_event().store(behind, Ordering::Relaxed);
        }
    }

    fn last_written(&self, layout: &RingLayout) -> (usize, usize) {
        (layout.used, 4)
    }
}

/// Reads the device's used index from guest memory. A restarted server without saved state resumes
/// from this index.
pub fn used_index(memory: &GuestMemory, layout: &RingLayout) -> u16 {
    let at = memory.map().at(layout.used + 2, 2);
    // SAFETY: inside the mapping, aligned, and only accessed atomically.
    unsafe { AtomicU16::from_ptr(at.cast()) }.load(Ordering::Acquire)
}
