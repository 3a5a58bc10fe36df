//! The in-flight region of a packed virtqueue (vhost-user, "Inflight I/O tracking"). The region
//! survives a crash of this process, so that each request is still completed exactly once.
//!
//! The region holds a copy of each descriptor that was taken, since the ring itself is overwritten.
//! Entries form lists by their links: one list of free entries, and one for each chain.
//!
//! Correctness depends on the order of the stores. A chain is in flight once `old_free_head` has
//! moved past its entries. A batch is published once the flags of its first descriptor in the ring
//! have changed:
//!
//! 1. The entries of the batch are put on the free list, at `free_head`.
//! 2. The position after the batch is stored.
//! 3. The ring is written, the first descriptor last.
//! 4. The marks of the batch are cleared.
//! 5. `old_free_head` and then the old position follow.
//!
//! A successor that finds two different positions looks at the ring, and finishes the batch or
//! takes it back.

use crate::inflight::InflightError;
use crate::memory::shared_u16;
use crate::position::Position;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

const VERSION: u16 = 1;

// struct QueueRegionPacked
const VERSION_OFFSET: usize = 8;
const DESC_NUM_OFFSET: usize = 10;
const FREE_HEAD_OFFSET: usize = 12;
const OLD_FREE_HEAD_OFFSET: usize = 14;
/// The fields used_idx, old_used_idx, used_wrap_counter and old_used_wrap_counter, and padding.
const POSITIONS_OFFSET: usize = 16;
const HEADER_SIZE: usize = 32;

// struct DescStatePacked
const INFLIGHT_OFFSET: usize = 0;
const NEXT_OFFSET: usize = 2;
const LAST_OFFSET: usize = 4;
const NUM_OFFSET: usize = 6;
const COUNTER_OFFSET: usize = 8;
/// The fields id, flags and len.
const REST_OFFSET: usize = 16;
const ADDR_OFFSET: usize = 24;
const ENTRY_SIZE: usize = 32;

/// Alignment in bytes of the regions of several queues, which follow one another.
const ALIGNMENT: usize = 64;

/// Returns the bytes that a packed queue of `size` entries occupies in the shared buffer.
pub fn region_size(size: u16) -> usize {
    (HEADER_SIZE + usize::from(size) * ENTRY_SIZE).next_multiple_of(ALIGNMENT)
}

/// A chain that was in flight in a predecessor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenChain {
    /// First entry of the chain in the region.
    pub entry: u16,
    /// Descriptors of the chain, in the format of packed queues; never empty.
    pub descriptors: Vec<[u64; 2]>,
}

/// State of a region when its queue starts.
#[derive(Debug, PartialEq, Eq)]
pub struct PackedRecovery {
    /// The used position of the predecessor; none if the region was never used before.
    pub used: Option<Position>,
    /// Chains to be submitted again, in the order in which they were taken.
    pub chains: Vec<TakenChain>,
}

/// The in-flight region of one queue, with private copies of its state. After the start, no value
/// that the front-end might overwrite is read back.
pub struct PackedInflight {
    base: NonNull<u8>,
    entries: u16,
    /// Number of entries in use, which is the queue's size.
    size: u16,
    counter: u64,
    free_head: u16,
    /// First entry of the chain that is being taken.
    chain_head: u16,
    chain_last: u16,
    chain_len: u16,
    /// The entry after each entry; `size` after the last free one.
    next: Box<[u16]>,
    /// The last entry of each chain, by its first.
    last: Box<[u16]>,
    used: Position,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the region is accessed only atomically and kept by `_owner`.
unsafe impl Send for PackedInflight {}

impl PackedInflight {
    /// Wraps the region of one queue with room for `entries` descriptors (the queue size in the
    /// front-end's message).
    ///
    /// # Safety
    /// `base` is 8-byte aligned and the start of a readable and writable mapping of at least
    /// [`region_size`]`(entries)` bytes. The mapping stays in place while `owner` lives, and this
    /// process accesses it only through this value.
    pub unsafe fn new(
        base: NonNull<u8>,
        entries: u16,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> PackedInflight {
        debug_assert!(base.cast::<u64>().is_aligned());
        PackedInflight {
            base,
            entries,
            size: 0,
            counter: 0,
            free_head: 0,
            chain_head: 0,
            chain_last: 0,
            chain_len: 0,
            next: Box::default(),
            last: Box::default(),
            used: Position::of_word(0),
            _owner: owner,
        }
    }

    /// Takes over the region for a queue of `size` entries that starts at `used` if the region is
    /// new. `is_available` tells whether the ring has a descriptor that the driver made available
    /// at this position. Finishes or takes back an interrupted batch.
    pub fn recover(
        &mut self,
        size: u16,
        used: Position,
        is_available: impl Fn(Position) -> bool,
    ) -> Result<PackedRecovery, InflightError> {
        let version = self.header(VERSION_OFFSET).load(Ordering::Acquire);
        let desc_num = self.header(DESC_NUM_OFFSET).load(Ordering::Relaxed);
        let region = desc_num.max(self.entries);
        if size > self.entries || region > self.entries {
            return Err(InflightError::Size {
                region,
                queue: size,
            });
        }
        match version {
            0 => return Ok(self.initialise(size, used)),
            VERSION => {}
            other => return Err(InflightError::Version(other)),
        }
        let has_other_size = desc_num != size;
        self.size = desc_num;
        self.next = vec![desc_num; usize::from(desc_num)].into_boxed_slice();
        self.last = self.next.clone();
        let (new, old) = self.positions();
        let fits = |at: Position| at.index < desc_num;
        if !fits(new) || !fits(old) {
            return Err(InflightError::Damaged("a position outside the queue"));
        }
        self.used = old;
        // A queue of another size has another ring; the predecessor's is gone.
        if new != old && (has_other_size || !is_available(old)) {
            self.used = new;
            let head = self.header(FREE_HEAD_OFFSET).load(Ordering::Relaxed);
            self.header(OLD_FREE_HEAD_OFFSET)
                .store(head, Ordering::Release);
        }
        self.store_positions(self.used, self.used);
        let chains = self.read_entries()?;
        if has_other_size {
            if !chains.is_empty() {
                return Err(InflightError::Size {
                    region: desc_num,
                    queue: size,
                });
            }
            // The driver has reinitialised its queue with another size.
            return Ok(self.initialise(size, used));
        }
        Ok(PackedRecovery {
            used: Some(self.used),
            chains,
        })
    }

    /// Initialises a region: all entries are free.
    fn initialise(&mut self, size: u16, used: Position) -> PackedRecovery {
        self.size = size;
        self.next = (1..=size).collect();
        self.last = self.next.clone();
        self.used = used;
        (self.counter, self.free_head, self.chain_head) = (0, 0, 0);
        self.header(VERSION_OFFSET).store(0, Ordering::Release);
        for entry in 0..size {
            self.inflight(entry).store(0, Ordering::Relaxed);
            self.field(entry, NEXT_OFFSET)
                .store(entry + 1, Ordering::Relaxed);
        }
        self.header(DESC_NUM_OFFSET).store(size, Ordering::Relaxed);
        self.header(FREE_HEAD_OFFSET).store(0, Ordering::Relaxed);
        self.header(OLD_FREE_HEAD_OFFSET)
            .store(0, Ordering::Relaxed);
        self.store_positions(used, used);
        self.header(VERSION_OFFSET)
            .store(VERSION, Ordering::Release);
        PackedRecovery {
            used: None,
            chains: Vec::new(),
        }
    }

    /// Reads the lists, clears the marks of free entries, and returns the chains in flight, ordered
    /// by their counters. Our counter continues after the last.
    fn read_entries(&mut self) -> Result<Vec<TakenChain>, InflightError> {
        let mut unread = usize::from(self.size);
        let mut is_read = vec![false; unread];
        let head = self.header(OLD_FREE_HEAD_OFFSET).load(Ordering::Relaxed);
        self.header(FREE_HEAD_OFFSET).store(head, Ordering::Release);
        (self.free_head, self.chain_head) = (head, head);
        let mut entry = head;
        while entry < self.size {
            self.read_link(&mut entry, &mut is_read, &mut unread, true)?;
        }
        let mut found: Vec<(u64, u16)> = (0..self.size)
            .filter(|entry| !is_read[usize::from(*entry)])
            .filter(|entry| self.inflight(*entry).load(Ordering::Relaxed) != 0)
            .map(|entry| {
                (
                    self.word(entry, COUNTER_OFFSET).load(Ordering::Relaxed),
                    entry,
                )
            })
            .collect();
        found.sort_unstable();
        let after = |(counter, _): &(u64, u16)| counter.wrapping_add(1);
        self.counter = found.last().map_or(0, after);
        let mut chains = Vec::with_capacity(found.len());
        for (_, head) in found {
            let len = self.field(head, NUM_OFFSET).load(Ordering::Relaxed);
            let mut descriptors = Vec::new();
            let (mut entry, mut last) = (head, head);
            for _ in 0..len {
                if entry >= self.size {
                    return Err(InflightError::Damaged("a chain that ends early"));
                }
                descriptors.push(self.descriptor(entry));
                last = entry;
                self.read_link(&mut entry, &mut is_read, &mut unread, false)?;
            }
            self.last[usize::from(head)] = last;
            chains.push(TakenChain {
                entry: head,
                descriptors,
            });
        }
        if unread > 0 || chains.iter().any(|chain| chain.descriptors.is_empty()) {
            return Err(InflightError::Damaged("entries that are in no list"));
        }
        Ok(chains)
    }

    /// Reads the link of `entry`, and moves on to the next entry of its list.
    fn read_link(
        &mut self,
        entry: &mut u16,
        is_read: &mut [bool],
        unread: &mut usize,
        is_free: bool,
    ) -> Result<(), InflightError> {
        let index = usize::from(*entry);
        if std::mem::replace(&mut is_read[index], true) {
            return Err(InflightError::Damaged("an entry in two lists"));
        }
        *unread -= 1;
        if is_free {
            self.inflight(*entry).store(0, Ordering::Release);
        }
        let next = self.field(*entry, NEXT_OFFSET).load(Ordering::Relaxed);
        self.next[index] = next.min(self.size);
        *entry = self.next[index];
        Ok(())
    }

    /// Adds a descriptor to the chain that is being taken. At most as many descriptors as the queue
    /// has entries may be in flight.
    #[inline]
    pub(crate) fn add(&mut self, [addr, rest]: [u64; 2]) {
        let entry = self.free_head;
        self.word(entry, ADDR_OFFSET).store(addr, Ordering::Relaxed);
        // The ring has the length first.
        self.word(entry, REST_OFFSET)
            .store(rest.rotate_right(32), Ordering::Relaxed);
        self.chain_last = entry;
        self.chain_len += 1;
        self.free_head = self.next[usize::from(entry)];
    }

    /// Records that the chain is in flight. Returns its entry.
    #[inline]
    pub(crate) fn end_chain(&mut self) -> u16 {
        let entry = self.chain_head;
        self.field(entry, LAST_OFFSET)
            .store(self.chain_last, Ordering::Relaxed);
        self.field(entry, NUM_OFFSET)
            .store(self.chain_len, Ordering::Relaxed);
        self.word(entry, COUNTER_OFFSET)
            .store(self.counter, Ordering::Relaxed);
        self.inflight(entry).store(1, Ordering::Relaxed);
        self.header(FREE_HEAD_OFFSET)
            .store(self.free_head, Ordering::Release);
        self.header(OLD_FREE_HEAD_OFFSET)
            .store(self.free_head, Ordering::Release);
        self.last[usize::from(entry)] = self.chain_last;
        self.counter = self.counter.wrapping_add(1);
        self.chain_head = self.free_head;
        self.chain_len = 0;
        entry
    }

    /// Forgets the chain that is being taken, because the driver has broken the ring.
    #[cold]
    pub(crate) fn abandon_chain(&mut self) {
        self.free_head = self.chain_head;
        self.chain_len = 0;
    }

    /// Puts the entries of a chain that is about to be published on the free list.
    #[inline]
    pub(crate) fn free(&mut self, entry: u16) {
        let last = self.last[usize::from(entry)];
        self.field(last, NEXT_OFFSET)
            .store(self.free_head, Ordering::Release);
        self.next[usize::from(last)] = self.free_head;
        self.free_head = entry;
        self.header(FREE_HEAD_OFFSET)
            .store(entry, Ordering::Release);
    }

    /// Records the used position after the batch that is about to be published.
    #[inline]
    pub(crate) fn will_use(&mut self, position: Position) {
        self.store_positions(position, self.used);
        self.used = position;
    }

    /// Clears the mark of a published chain.
    #[inline]
    pub(crate) fn clear(&mut self, entry: u16) {
        self.inflight(entry).store(0, Ordering::Release);
    }

    /// Records that the batch is published and its marks are cleared.
    #[inline]
    pub(crate) fn have_used(&mut self) {
        self.chain_head = self.free_head;
        self.header(OLD_FREE_HEAD_OFFSET)
            .store(self.free_head, Ordering::Release);
        self.store_positions(self.used, self.used);
    }

    /// Returns the position after the last batch, and the one before it.
    fn positions(&self) -> (Position, Position) {
        let word = self.positions_word().load(Ordering::Relaxed);
        let bytes = word.to_ne_bytes();
        let at = |index: usize, wrap: u8| Position {
            index: u16::from_ne_bytes([bytes[index], bytes[index + 1]]),
            wrap: wrap != 0,
        };
        (at(0, bytes[4]), at(2, bytes[5]))
    }

    /// Stores both positions at once.
    #[inline]
    fn store_positions(&self, new: Position, old: Position) {
        let mut bytes = [0; 8];
        bytes[..2].copy_from_slice(&new.index.to_ne_bytes());
        bytes[2..4].copy_from_slice(&old.index.to_ne_bytes());
        bytes[4] = new.wrap.into();
        bytes[5] = old.wrap.into();
        self.positions_word()
            .store(u64::from_ne_bytes(bytes), Ordering::Release);
    }

    /// Returns a descriptor as the ring had it.
    fn descriptor(&self, entry: u16) -> [u64; 2] {
        let rest = self.word(entry, REST_OFFSET).load(Ordering::Relaxed);
        let addr = self.word(entry, ADDR_OFFSET).load(Ordering::Relaxed);
        [addr, rest.rotate_left(32)]
    }

    #[inline(always)]
    fn positions_word(&self) -> &AtomicU64 {
        // SAFETY: within the region, 8-aligned, accessed only atomically.
        unsafe { AtomicU64::from_ptr(self.base.add(POSITIONS_OFFSET).as_ptr().cast()) }
    }

    #[inline(always)]
    fn header(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: within the region, 2-aligned, accessed only atomically.
        unsafe { shared_u16(self.base.add(offset)) }
    }

    /// Returns the address of an entry's field.
    #[inline(always)]
    fn entry(&self, entry: u16, offset: usize) -> NonNull<u8> {
        assert!(entry < self.entries, "lists are checked when read");
        // SAFETY: within the region by the assertion.
        unsafe {
            self.base
                .add(HEADER_SIZE + usize::from(entry) * ENTRY_SIZE + offset)
        }
    }

    #[inline(always)]
    fn field(&self, entry: u16, offset: usize) -> &AtomicU16 {
        // SAFETY: within the region, 2-aligned, accessed only atomically.
        unsafe { shared_u16(self.entry(entry, offset)) }
    }

    #[inline(always)]
    fn inflight(&self, entry: u16) -> &AtomicU8 {
        // SAFETY: within the region, accessed only atomically.
        unsafe { AtomicU8::from_ptr(self.entry(entry, INFLIGHT_OFFSET).as_ptr()) }
    }

    #[inline(always)]
    fn word(&self, entry: u16, offset: usize) -> &AtomicU64 {
        // SAFETY: within the region, 8-aligned, accessed only atomically.
        unsafe { AtomicU64::from_ptr(self.entry(entry, offset).as_ptr().cast()) }
    }
}
