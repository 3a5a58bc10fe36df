//! The device side of a split virtqueue (2.7): takes heads, returns used elements, and controls
//! notifications in both directions.

use crate::descriptor::Descriptor;
use crate::dirty_log::DirtyLog;
use crate::inflight::InflightQueue;
use crate::memory::{GuestMemory, read_pair, shared_u16};
use crate::queue::layout::*;
pub use crate::ring::{MAX_SIZE, RingAddresses, RingError};
use crate::ring::{Ring, RingSetup, StartError, Started, need_event, place};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering, fence};

/// Offsets and sizes of the rings (2.7.5 to 2.7.8), in bytes.
pub(crate) mod layout {
    pub const DESCRIPTOR_SIZE: usize = 16;
    pub const FLAGS: usize = 0;
    pub const IDX: usize = 2;
    pub const RING: usize = 4;
    pub const AVAIL_ELEMENT: usize = 2;
    pub const USED_ELEMENT: usize = 8;

    pub fn descriptors_len(size: u16) -> u64 {
        (DESCRIPTOR_SIZE * usize::from(size)) as u64
    }

    /// Includes `used_event` at the end.
    pub fn avail_len(size: u16) -> u64 {
        (RING + AVAIL_ELEMENT * usize::from(size) + 2) as u64
    }

    /// Includes `avail_event` at the end.
    pub fn used_len(size: u16) -> u64 {
        (RING + USED_ELEMENT * usize::from(size) + 2) as u64
    }
}

const AVAIL_F_NO_INTERRUPT: u16 = 1;
const USED_F_NO_NOTIFY: u16 = 1;

/// A split virtqueue. The memory of its rings must outlive the queue.
pub struct SplitQueue {
    desc: NonNull<u8>,
    avail: NonNull<u8>,
    used: NonNull<u8>,
    size: u16,
    event_idx: bool,
    /// Index of the next avail ring entry to take.
    next_avail: u16,
    /// Index of the next used ring entry to write.
    next_used: u16,
    /// Used index that the driver can see.
    published: u16,
    /// Used index at the last call of `needs_call`.
    considered: u16,
}

// SAFETY: pointers into guest memory, which may be used from any thread.
unsafe impl Send for SplitQueue {}

impl SplitQueue {
    /// Creates a queue of `size` entries. The avail index starts at `base`, and the used index at
    /// the value in the ring's memory.
    ///
    /// # Safety
    /// `memory` outlives the queue.
    pub unsafe fn new(
        memory: &GuestMemory,
        at: RingAddresses,
        size: u16,
        base: u16,
        event_idx: bool,
    ) -> Result<SplitQueue, RingError> {
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(RingError::Size(size));
        }
        let mut queue = SplitQueue {
            desc: place(
                memory,
                "descriptor table",
                at.desc,
                descriptors_len(size),
                16,
            )?,
            avail: place(memory, "avail ring", at.avail, avail_len(size), 2)?,
            used: place(memory, "used ring", at.used, used_len(size), 4)?,
            size,
            event_idx,
            next_avail: base,
            next_used: 0,
            published: 0,
            considered: 0,
        };
        queue.next_used = u16::from_le(queue.used_field(IDX).load(Ordering::Acquire));
        queue.published = queue.next_used;
        queue.considered = queue.next_used;
        Ok(queue)
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the avail index of the next head to be popped.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Sets the avail index of the next head to be popped, for a queue with a predecessor.
    pub fn set_next_avail(&mut self, index: u16) {
        self.next_avail = index;
    }

    /// Returns the index of the next used element.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Returns whether the driver has made any chains available.
    #[inline]
    pub fn pending(&self) -> bool {
        self.avail_idx() != self.next_avail
    }

    /// Returns the number of heads that can be popped. Reads the avail index once.
    #[inline]
    pub fn available(&self) -> Result<u16, RingError> {
        let avail = self.avail_idx();
        let n = avail.wrapping_sub(self.next_avail);
        if n > self.size {
            return Err(RingError::Jump {
                avail,
                seen: self.next_avail,
                size: self.size,
            });
        }
        Ok(n)
    }

    /// Takes the next head, one of those that `available` has counted.
    #[inline(always)]
    pub fn pop(&mut self) -> Result<u16, RingError> {
        let slot = usize::from(self.next_avail & (self.size - 1));
        let entry = self.avail_field(RING + AVAIL_ELEMENT * slot);
        let head = u16::from_le(entry.load(Ordering::Relaxed));
        if head >= self.size {
            return Err(RingError::Head {
                head,
                size: self.size,
            });
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(head)
    }

    /// Returns a private copy of the first descriptor of the chain at `head`, a value that `pop`
    /// returned.
    #[inline(always)]
    pub(crate) fn first_descriptor(&self, head: u16) -> Descriptor {
        assert!(head < self.size);
        // SAFETY: within the table, which is aligned, by the assertion.
        let pair = unsafe { read_pair(self.desc.add(usize::from(head) * DESCRIPTOR_SIZE)) };
        Descriptor::new(pair)
    }

    /// Returns the address of the descriptor table, which has `size` entries.
    #[inline(always)]
    pub(crate) fn table(&self) -> NonNull<u8> {
        self.desc
    }

    /// Adds a used element for `head` with `len` bytes written. The driver sees it after `publish`.
    #[inline]
    pub fn push_used(&mut self, head: u16, len: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        let element = u64::from(head) | u64::from(len) << 32;
        // SAFETY: within the used ring. The ring is 4-aligned and its elements begin at offset 4,
        // so the elements are not always 8-aligned.
        unsafe {
            let at = self.used.add(RING + USED_ELEMENT * slot).cast::<u32>();
            at.write_volatile((element as u32).to_le());
            at.add(1).write_volatile(((element >> 32) as u32).to_le());
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Returns the number of used elements that are not published yet.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Makes the used elements visible to the driver.
    #[inline]
    pub fn publish(&mut self) {
        let index = self.next_used.to_le();
        self.used_field(IDX).store(index, Ordering::Release);
        self.published = self.next_used;
    }

    /// Returns whether the driver wants an interrupt for the elements published since the previous
    /// call (2.7.7.2).
    #[inline]
    pub fn needs_call(&mut self) -> bool {
        // The device publishes first and then checks whether the driver requests an interrupt. The
        // driver requests an interrupt first and then checks the used index. At least one side
        // surely sees the other's store only if neither side's load is reordered before its store.
        fence(Ordering::SeqCst);
        let (old, new) = (self.considered, self.published);
        self.considered = new;
        if self.event_idx {
            let event = self.avail_field(RING + AVAIL_ELEMENT * usize::from(self.size));
            need_event(u16::from_le(event.load(Ordering::Relaxed)), new, old)
        } else {
            let flags = self.avail_field(FLAGS).load(Ordering::Relaxed);
            old != new && u16::from_le(flags) & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// Asks the driver to kick. Returns true if chains are available already, for which the driver
    /// may not kick.
    pub fn enable_kicks(&mut self) -> bool {
        if self.event_idx {
            self.set_avail_event(self.next_avail);
        } else {
            self.used_field(FLAGS).store(0, Ordering::Relaxed);
        }
        // The device requests kicks first and then checks the avail index. The driver makes chains
        // available first and then checks whether to kick. See `needs_call`.
        fence(Ordering::SeqCst);
        self.pending()
    }

    /// Asks the driver not to kick. The driver may kick all the same.
    pub fn disable_kicks(&mut self) {
        if self.event_idx {
            // The driver passes this index again only after 65,535 more chains.
            self.set_avail_event(self.next_avail.wrapping_sub(1));
        } else {
            let flags = USED_F_NO_NOTIFY.to_le();
            self.used_field(FLAGS).store(flags, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn avail_idx(&self) -> u16 {
        u16::from_le(self.avail_field(IDX).load(Ordering::Acquire))
    }

    fn set_avail_event(&self, index: u16) {
        let field = self.used_field(RING + USED_ELEMENT * usize::from(self.size));
        field.store(index.to_le(), Ordering::Relaxed);
    }

    #[inline(always)]
    fn avail_field(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: the offsets used lie within the avail ring and are even.
        unsafe { shared_u16(self.avail.add(offset)) }
    }

    #[inline(always)]
    fn used_field(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: the offsets used lie within the used ring and are even.
        unsafe { shared_u16(self.used.add(offset)) }
    }
}

/// Prefetches a cache line that will be read. The prefetch is only a hint: any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect that the program can observe, and never faults.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

impl Ring for SplitQueue {
    type Region = InflightQueue;
    /// The head of the chain.
    type Chain = u16;
    const PACKED: bool = false;

    unsafe fn start(
        memory: &GuestMemory,
        setup: &RingSetup,
        region: &mut Option<InflightQueue>,
    ) -> Result<Started<SplitQueue>, StartError> {
        let RingSetup {
            at,
            size,
            base,
            event_idx,
        } = *setup;
        let base = u16::try_from(base).map_err(|_| RingError::Base { base, size })?;
        // SAFETY: by the caller.
        let mut ring = unsafe { SplitQueue::new(memory, at, size, base, event_idx) }?;
        let mut resubmit = Vec::new();
        let mut has_predecessor = ring.next_used() != 0;
        if let Some(inflight) = region {
            let recovery = inflight.recover(size, ring.next_used())?;
            // (The used index may have wrapped around to 0.)
            has_predecessor |= !recovery.fresh;
            if !recovery.fresh {
                // Every popped head is either used or in flight.
                let popped = recovery.heads.len() as u16;
                ring.set_next_avail(ring.next_used().wrapping_add(popped));
            }
            resubmit = recovery.heads;
        }
        Ok(Started {
            ring,
            resubmit,
            has_predecessor,
        })
    }

    #[inline(always)]
    fn size(&self) -> u16 {
        self.size
    }

    fn base(&self) -> u32 {
        self.next_avail.into()
    }

    #[inline(always)]
    fn pending(&self) -> bool {
        self.pending()
    }

    #[inline(always)]
    fn available(&self) -> Result<usize, RingError> {
        self.available().map(usize::from)
    }

    #[inline(always)]
    fn take(&mut self, region: &mut Option<InflightQueue>) -> Result<Option<u16>, RingError> {
        let head = self.pop()?;
        if let Some(inflight) = region {
            inflight.mark(head);
        }
        Ok(Some(head))
    }

    #[inline(always)]
    fn tag(chain: u16) -> u16 {
        chain
    }

    #[inline(always)]
    fn first_descriptor(&self, chain: u16) -> Descriptor {
        self.first_descriptor(chain)
    }

    #[inline(always)]
    fn table(&self) -> NonNull<u8> {
        self.table()
    }

    #[inline(always)]
    fn push_used(&mut self, tag: u16, len: u32, region: &mut Option<InflightQueue>) {
        self.push_used(tag, len);
        if let Some(inflight) = region {
            inflight.link(tag);
        }
    }

    #[inline(always)]
    fn unpublished(&self) -> u16 {
        self.unpublished()
    }

    #[inline(always)]
    fn publish(&mut self, region: &mut Option<InflightQueue>) {
        self.publish();
        if let Some(inflight) = region {
            inflight.published(self.next_used);
        }
    }

    #[inline(always)]
    fn needs_call(&mut self) -> bool {
        self.needs_call()
    }

    fn enable_kicks(&mut self) -> bool {
        self.enable_kicks()
    }

    fn disable_kicks(&mut self) {
        self.disable_kicks();
    }

    fn logged_len(size: u16) -> u64 {
        used_len(size)
    }

    /// Logs used elements and the used index.
    fn log_used(&self, log: &DirtyLog, addr: u64, new: u16) {
        let (size, end) = (self.size, self.next_used);
        for index in (1..=new).map(|back| end.wrapping_sub(back) & (size - 1)) {
            let offset = RING + USED_ELEMENT * usize::from(index);
            log.mark(addr + offset as u64, USED_ELEMENT as u64);
        }
        log.mark(addr + IDX as u64, 2);
    }

    fn log_kick_wishes(&self, log: &DirtyLog, addr: u64) {
        log.mark(addr, 2);
        log.mark(addr + used_len(self.size) - 2, 2);
    }
}
