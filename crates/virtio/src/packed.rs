//! The device side of a packed virtqueue (2.8): takes chains, returns used descriptors, and
//! controls notifications in both directions.
//!
//! The driver can overwrite a descriptor at any time. Therefore each descriptor is copied once,
//! with one load for the word that contains its flags, and chains are parsed from the copies.
//!
//! Used descriptors stay private until `publish`, which writes the first one last. The driver looks
//! only at the first one until that one is used, so a batch appears at once.

use crate::descriptor::Descriptor;
use crate::dirty_log::DirtyLog;
use crate::inflight::InflightError;
use crate::memory::GuestMemory;
use crate::packed_inflight::{PackedInflight, TakenChain};
pub use crate::position::{INITIAL_BASE, Position};
use crate::queue::layout::{DESCRIPTOR_SIZE, descriptors_len};
use crate::ring::{
    MAX_SIZE, Ring, RingAddresses, RingError, RingSetup, StartError, Started, need_event, place,
};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Flags in the second word of a descriptor, which is length, id and flags.
const FLAGS_SHIFT: u32 = 48;
const F_NEXT: u64 = 1 << FLAGS_SHIFT;
const F_WRITE: u64 = 2 << FLAGS_SHIFT;
const F_AVAIL: u64 = 1 << (FLAGS_SHIFT + 7);
const F_USED: u64 = 1 << (FLAGS_SHIFT + 15);
const F_OWNER: u64 = F_AVAIL | F_USED;
const ID_SHIFT: u32 = 32;

/// Size in bytes of an event suppression structure (2.8.10).
const EVENT_SIZE: u64 = 4;
/// Place of the flags in an event suppression structure, read as one word.
const EVENT_FLAGS_SHIFT: u32 = 16;
const EVENT_FLAGS_MASK: u32 = 3;
const EVENT_ENABLE: u32 = 0;
const EVENT_DISABLE: u32 = 1;
const EVENT_DESC: u32 = 2;

/// Returns the owner flags of a descriptor that the driver makes available in this lap.
#[inline(always)]
fn available_flags(wrap: bool) -> u64 {
    if wrap { F_AVAIL } else { F_USED }
}

/// Returns the owner flags of a descriptor that the device uses in this lap.
#[inline(always)]
fn used_flags(wrap: bool) -> u64 {
    if wrap { F_OWNER } else { 0 }
}

/// A chain that was taken from the ring.
#[derive(Clone, Copy, Debug)]
pub struct PackedChain {
    /// The driver's number for the chain.
    id: u16,
    first: Descriptor,
}

/// State of a buffer id.
#[derive(Clone, Copy, Debug, Default)]
struct Buffer {
    /// Number of the chain's descriptors; 0 if the driver has the buffer.
    count: u16,
    /// Entry of the chain in the in-flight region, if there is one.
    entry: u16,
}

/// A used element that is not published yet.
#[derive(Clone, Copy, Debug)]
struct Used {
    id: u16,
    count: u16,
    entry: u16,
    len: u32,
}

/// A packed virtqueue. The memory of its ring must outlive the queue.
pub struct PackedQueue {
    ring: NonNull<u8>,
    driver_event: NonNull<u8>,
    device_event: NonNull<u8>,
    size: u16,
    event_idx: bool,
    /// Position of the next descriptor to take.
    next_avail: Position,
    /// Position of the next used descriptor to write.
    next_used: Position,
    /// Number of descriptors that were taken and whose use is not published.
    outstanding: u16,
    /// Number of descriptors used since the last call of `needs_call`.
    added: u16,
    /// Private copies of the descriptors of direct chains, at their positions in the ring, in the
    /// format of split queues and the byte order of guest memory.
    copies: Box<[[u64; 2]]>,
    /// By buffer id.
    buffers: Box<[Buffer]>,
    /// Elements to be published, in order.
    used: Vec<Used>,
    /// Number of descriptors of `used`.
    unpublished: u16,
    /// Guest address of the ring, for the dirty log.
    gpa: Option<u64>,
    /// The ring was changed when the queue started.
    is_repaired: bool,
}

// SAFETY: pointers into guest memory, which may be used from any thread.
unsafe impl Send for PackedQueue {}

impl PackedQueue {
    /// Creates a queue that starts at `setup.base`.
    ///
    /// # Safety
    /// `memory` outlives the queue.
    unsafe fn new(memory: &GuestMemory, setup: &RingSetup) -> Result<PackedQueue, RingError> {
        let RingSetup {
            at: RingAddresses { desc, avail, used },
            size,
            base,
            event_idx,
        } = *setup;
        if !(1..=MAX_SIZE).contains(&size) {
            return Err(RingError::PackedSize(size));
        }
        let outside = RingError::Base { base, size };
        let (next_avail, next_used) = Position::of_base(base);
        let outstanding = next_avail.distance_from(next_used, size).ok_or(outside)?;
        let entries = usize::from(size);
        let ring = place(memory, "descriptor ring", desc, descriptors_len(size), 16)?;
        Ok(PackedQueue {
            ring,
            driver_event: place(memory, "driver event structure", avail, EVENT_SIZE, 4)?,
            device_event: place(memory, "device event structure", used, EVENT_SIZE, 4)?,
            size,
            event_idx,
            next_avail,
            next_used,
            outstanding,
            added: 0,
            copies: vec![[0; 2]; entries].into_boxed_slice(),
            buffers: vec![Buffer::default(); entries].into_boxed_slice(),
            used: Vec::with_capacity(entries),
            unpublished: 0,
            gpa: memory.gpa_of(ring.as_ptr()),
            is_repaired: false,
        })
    }

    /// Takes over the chains that a predecessor had in flight.
    fn resume(
        &mut self,
        used: Position,
        chains: &[TakenChain],
    ) -> Result<Vec<PackedChain>, StartError> {
        self.next_used = used;
        self.next_avail = used;
        self.outstanding = 0;
        let mut resubmit = Vec::with_capacity(chains.len());
        for chain in chains {
            resubmit.push(self.resume_chain(chain)?);
        }
        Ok(resubmit)
    }

    /// Takes over a chain. The in-flight region has checked that all chains together have no more
    /// descriptors than the queue.
    fn resume_chain(&mut self, chain: &TakenChain) -> Result<PackedChain, StartError> {
        let mut first = None;
        for words in &chain.descriptors {
            let at = self.next_avail;
            let next = at.after(1, self.size);
            let descriptor = Descriptor::from_packed(*words, next.index);
            self.copies[usize::from(at.index)] = descriptor.words().map(u64::to_le);
            first.get_or_insert(descriptor);
            self.repair(at);
            self.next_avail = next;
            self.outstanding += 1;
        }
        let damaged = InflightError::Damaged;
        let (first, last) = first
            .zip(chain.descriptors.last())
            .ok_or(damaged("a chain without descriptors"))?;
        let id = (last[1] >> ID_SHIFT) as u16;
        let buffer = self.buffers.get_mut(usize::from(id));
        let buffer = buffer.ok_or(damaged("a buffer id outside the queue"))?;
        if buffer.count > 0 {
            return Err(damaged("the same buffer twice").into());
        }
        *buffer = Buffer {
            count: chain.descriptors.len() as u16,
            entry: chain.entry,
        };
        Ok(PackedChain { id, first })
    }

    /// Takes back the mark of a used descriptor that a killed device wrote but did not publish.
    /// Another descriptor will be published here, or none.
    fn repair(&mut self, at: Position) {
        let word = u64::from_le(self.flags_word(at.index).load(Ordering::Relaxed));
        if word & F_OWNER == used_flags(at.wrap) {
            let word = word & !F_OWNER | available_flags(at.wrap);
            self.flags_word(at.index)
                .store(word.to_le(), Ordering::Relaxed);
            self.is_repaired = true;
        }
    }

    /// Copies the rest of a direct chain. Returns the number of descriptors and the last one's
    /// second word.
    #[inline(never)]
    fn copy_chain(
        &mut self,
        mut words: [u64; 2],
        region: &mut Option<PackedInflight>,
    ) -> Result<(u16, u64), RingError> {
        let room = self.size - self.outstanding;
        let mut at = self.next_avail.index;
        let mut count = 0;
        loop {
            if count == room {
                return Err(RingError::Overrun { size: self.size });
            }
            count += 1;
            let next = if at + 1 == self.size { 0 } else { at + 1 };
            let copy = Descriptor::from_packed(words, next).words();
            self.copies[usize::from(at)] = copy.map(u64::to_le);
            if let Some(region) = region {
                region.add(words);
            }
            if words[1] & F_NEXT == 0 {
                return Ok((count, words[1]));
            }
            at = next;
            let rest = u64::from_le(self.flags_word(at).load(Ordering::Relaxed));
            words = [self.address(at), rest];
        }
    }

    /// Records that the device has the chain at the next position, whose first descriptor is
    /// `words`. Returns the number of its descriptors and its id.
    #[inline(always)]
    fn take_descriptors(
        &mut self,
        words: [u64; 2],
        region: &mut Option<PackedInflight>,
    ) -> Result<(u16, u16), RingError> {
        let (size, rest) = (self.size, words[1]);
        let (count, last) = if rest & F_NEXT != 0 {
            self.copy_chain(words, region)?
        } else if self.outstanding == size {
            return Err(RingError::Overrun { size });
        } else {
            if let Some(region) = region {
                region.add(words);
            }
            (1, rest)
        };
        let id = (last >> ID_SHIFT) as u16;
        let Some(buffer) = self.buffers.get_mut(usize::from(id)) else {
            return Err(RingError::Id { id, size });
        };
        if buffer.count > 0 {
            return Err(RingError::Twice { id });
        }
        buffer.count = count;
        if let Some(region) = region {
            buffer.entry = region.end_chain();
        }
        Ok((count, id))
    }

    #[inline(always)]
    fn is_available(&self, at: Position) -> Option<u64> {
        // Acquire: the rest of the chain was written before the flags.
        let word = u64::from_le(self.flags_word(at.index).load(Ordering::Acquire));
        (word & F_OWNER == available_flags(at.wrap)).then_some(word)
    }

    /// Returns the address field of a descriptor. Volatile, since the driver may change it.
    #[inline(always)]
    fn address(&self, index: u16) -> u64 {
        debug_assert!(index < self.size);
        // SAFETY: within the ring, aligned, since positions are below the size.
        let word = unsafe { self.ring.add(usize::from(index) * DESCRIPTOR_SIZE) };
        // SAFETY: as above.
        u64::from_le(unsafe { word.cast::<u64>().read_volatile() })
    }

    /// Returns length, id and flags of a descriptor.
    #[inline(always)]
    fn flags_word(&self, index: u16) -> &AtomicU64 {
        debug_assert!(index < self.size);
        // SAFETY: within the ring, 8-aligned, since positions are below the size. An atomic may be
        // shared with others that change it.
        unsafe {
            let at = self.ring.add(usize::from(index) * DESCRIPTOR_SIZE + 8);
            AtomicU64::from_ptr(at.as_ptr().cast())
        }
    }

    #[inline(always)]
    fn write_used(&self, at: Position, used: &Used, order: Ordering) {
        let write = if used.len > 0 { F_WRITE } else { 0 };
        let id = u64::from(used.id) << ID_SHIFT;
        let word = u64::from(used.len) | id | write | used_flags(at.wrap);
        self.flags_word(at.index).store(word.to_le(), order);
    }

    fn event(&self, at: NonNull<u8>) -> &AtomicU32 {
        // SAFETY: one of the two structures, 4-aligned. An atomic may be shared with others that
        // change it.
        unsafe { AtomicU32::from_ptr(at.as_ptr().cast()) }
    }

    fn set_device_event(&self, flags: u32, position: u16) {
        let word = u32::from(position) | flags << EVENT_FLAGS_SHIFT;
        self.event(self.device_event)
            .store(word.to_le(), Ordering::Relaxed);
    }

    fn log_range(&self, log: &DirtyLog, start: u16, count: u16) {
        let Some(gpa) = self.gpa else {
            return;
        };
        let until_end = count.min(self.size - start);
        let mark = |index: u16, count: u16| {
            let size = DESCRIPTOR_SIZE as u64;
            log.mark(gpa + u64::from(index) * size, u64::from(count) * size);
        };
        mark(start, until_end);
        mark(0, count - until_end);
    }
}

impl Ring for PackedQueue {
    type Region = PackedInflight;
    type Chain = PackedChain;
    const PACKED: bool = true;

    unsafe fn start(
        memory: &GuestMemory,
        setup: &RingSetup,
        region: &mut Option<PackedInflight>,
    ) -> Result<Started<PackedQueue>, StartError> {
        // SAFETY: by the caller.
        let mut ring = unsafe { PackedQueue::new(memory, setup) }?;
        let mut resubmit = Vec::new();
        let mut has_predecessor = setup.base != INITIAL_BASE;
        if let Some(region) = region {
            let is_available = |at| ring.is_available(at).is_some();
            let recovery = region.recover(ring.size, ring.next_used, is_available)?;
            if let Some(used) = recovery.used {
                has_predecessor = true;
                resubmit = ring.resume(used, &recovery.chains)?;
            }
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
        Position::base(self.next_avail, self.next_used)
    }

    #[inline(always)]
    fn pending(&self) -> bool {
        self.is_available(self.next_avail).is_some()
    }

    #[inline(always)]
    fn available(&self) -> Result<usize, RingError> {
        Ok(usize::from(self.size))
    }

    #[inline(always)]
    fn take(
        &mut self,
        region: &mut Option<PackedInflight>,
    ) -> Result<Option<PackedChain>, RingError> {
        let at = self.next_avail;
        let Some(rest) = self.is_available(at) else {
            return Ok(None);
        };
        let words = [self.address(at.index), rest];
        let taken = self.take_descriptors(words, region);
        let (count, id) = taken.inspect_err(|_| {
            if let Some(region) = region {
                region.abandon_chain();
            }
        })?;
        self.outstanding += count;
        let next = at.after(1, self.size);
        let first = Descriptor::from_packed(words, next.index);
        self.next_avail = at.after(count, self.size);
        Ok(Some(PackedChain { id, first }))
    }

    #[inline(always)]
    fn tag(chain: PackedChain) -> u16 {
        chain.id
    }

    #[inline(always)]
    fn first_descriptor(&self, chain: PackedChain) -> Descriptor {
        chain.first
    }

    #[inline(always)]
    fn table(&self) -> NonNull<u8> {
        NonNull::from(&*self.copies).cast()
    }

    #[inline(always)]
    fn push_used(&mut self, tag: u16, len: u32, _: &mut Option<PackedInflight>) {
        let Buffer { count, entry } = self.buffers[usize::from(tag)];
        self.unpublished += count;
        self.used.push(Used {
            id: tag,
            count,
            entry,
            len,
        });
    }

    #[inline(always)]
    fn unpublished(&self) -> u16 {
        self.unpublished
    }

    #[inline(always)]
    fn publish(&mut self, region: &mut Option<PackedInflight>) {
        let start = self.next_used;
        let Some((first, others)) = self.used.split_first() else {
            return;
        };
        let end = start.after(self.unpublished, self.size);
        if let Some(region) = region {
            self.used.iter().for_each(|used| region.free(used.entry));
            region.will_use(end);
        }
        let mut at = start.after(first.count, self.size);
        for used in others {
            self.write_used(at, used, Ordering::Relaxed);
            at = at.after(used.count, self.size);
        }
        self.write_used(start, first, Ordering::Release);
        if let Some(region) = region {
            self.used.iter().for_each(|used| region.clear(used.entry));
            region.have_used();
        }
        for used in self.used.drain(..) {
            self.buffers[usize::from(used.id)].count = 0;
        }
        self.next_used = end;
        self.outstanding -= self.unpublished;
        self.added = self.added.wrapping_add(self.unpublished);
        self.unpublished = 0;
    }

    #[inline(always)]
    fn needs_call(&mut self) -> bool {
        // See `SplitQueue::needs_call`.
        fence(Ordering::SeqCst);
        let added = std::mem::take(&mut self.added);
        let event = self.event(self.driver_event).load(Ordering::Relaxed);
        let event = u32::from_le(event);
        match event >> EVENT_FLAGS_SHIFT & EVENT_FLAGS_MASK {
            EVENT_DISABLE => false,
            EVENT_DESC if self.event_idx => {
                let wanted = Position::of_word(event as u16);
                let new = self.next_used;
                // An index of the previous lap lies before the start of this lap.
                let lap = if wanted.wrap == new.wrap {
                    0
                } else {
                    self.size
                };
                let index = wanted.index.wrapping_sub(lap);
                need_event(index, new.index, new.index.wrapping_sub(added))
            }
            _ => added > 0,
        }
    }

    fn enable_kicks(&mut self) -> bool {
        if self.event_idx {
            self.set_device_event(EVENT_DESC, self.next_avail.word());
        } else {
            self.set_device_event(EVENT_ENABLE, 0);
        }
        // See `SplitQueue::enable_kicks`.
        fence(Ordering::SeqCst);
        self.pending()
    }

    fn disable_kicks(&mut self) {
        self.set_device_event(EVENT_DISABLE, 0);
    }

    fn logged_len(_: u16) -> u64 {
        EVENT_SIZE
    }

    /// Logs used descriptors. The ring lies in the guest's memory, unlike its logged address, which
    /// is that of the device's event suppression.
    fn log_used(&self, log: &DirtyLog, _: u64, new: u16) {
        let start = self.next_used.before(new, self.size);
        self.log_range(log, start, new);
    }

    fn log_kick_wishes(&self, log: &DirtyLog, addr: u64) {
        log.mark(addr, EVENT_SIZE);
    }

    fn log_start(&self, log: &DirtyLog) {
        if self.is_repaired {
            self.log_range(log, 0, self.size);
        }
    }
}
