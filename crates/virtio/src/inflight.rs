//! The in-flight region of a split virtqueue (vhost-user, "Inflight I/O tracking"). The region
//! survives a crash of this process, so that each request is still completed exactly once.
//!
//! Correctness depends on the order of the stores:
//!
//! 1. When a head is popped, it is marked.
//! 2. When the head's request is answered, the head is linked into the list of the last batch.
//! 3. The used index is published.
//! 4. The marks of the batch are cleared.
//! 5. The used index is stored in the region.
//!
//! After a crash, the successor compares the two used indices, which show whether the last batch
//! was published. If the batch was published, the successor finishes clearing its marks.

use crate::memory::shared_u16;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

const VERSION: u16 = 1;

// struct QueueRegionSplit
const VERSION_OFFSET: usize = 8;
const DESC_NUM_OFFSET: usize = 10;
const LAST_BATCH_HEAD_OFFSET: usize = 12;
const USED_IDX_OFFSET: usize = 14;
const HEADER_SIZE: usize = 16;

// struct DescStateSplit
const INFLIGHT_OFFSET: usize = 0;
const NEXT_OFFSET: usize = 6;
const COUNTER_OFFSET: usize = 8;
const ENTRY_SIZE: usize = 16;

/// Alignment in bytes of the regions of several queues, which follow one another.
const ALIGNMENT: usize = 64;

/// Returns the bytes that a queue of `size` entries occupies in the shared buffer. The region of
/// queue i begins at i times this value.
pub fn region_size(size: u16) -> usize {
    (HEADER_SIZE + usize::from(size) * ENTRY_SIZE).next_multiple_of(ALIGNMENT)
}

/// The region cannot belong to this queue.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InflightError {
    /// The region has this version instead of 1.
    #[error("the in-flight region has version {0}; only version 1 is known")]
    Version(u16),
    /// The region belongs to a queue of another size.
    #[error(
        "the in-flight region is that of a queue with {region} entries, \
         but the queue has {queue}"
    )]
    Size {
        /// Number of entries of the queue that the region describes.
        region: u16,
        /// Number of entries of the queue to be started.
        queue: u16,
    },
    /// The region of a packed queue holds a state that no device leaves behind.
    #[error(
        "the in-flight region of the packed queue is damaged: it has {0}; reset the virtual machine"
    )]
    Damaged(&'static str),
}

/// State of a region when its queue starts.
#[derive(Debug, PartialEq, Eq)]
pub struct Recovery {
    /// The region was never used before.
    pub fresh: bool,
    /// Heads to be submitted again, in the order in which they were popped.
    pub heads: Vec<u16>,
}

/// The in-flight region of one queue, with private copies of its state. After the start, no value
/// that the front-end might overwrite is read back.
pub struct InflightQueue {
    base: NonNull<u8>,
    entries: u16,
    counter: u64,
    last_batch_head: u16,
    /// Heads linked since the last publication.
    batch: Vec<u16>,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the region is accessed only atomically and kept by `_owner`.
unsafe impl Send for InflightQueue {}

impl InflightQueue {
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
    ) -> InflightQueue {
        debug_assert!(base.cast::<u64>().is_aligned());
        InflightQueue {
            base,
            entries,
            counter: 0,
            last_batch_head: 0,
            batch: Vec::new(),
            _owner: owner,
        }
    }

    /// Takes over the region for a queue of `size` entries whose used ring has the index
    /// `used_idx`. Finishes an interrupted batch and returns the heads in flight.
    pub fn recover(&mut self, size: u16, used_idx: u16) -> Result<Recovery, InflightError> {
        let version = self.header(VERSION_OFFSET).load(Ordering::Acquire);
        let desc_num = self.header(DESC_NUM_OFFSET).load(Ordering::Relaxed);
        let region = desc_num.max(self.entries);
        if size > self.entries || region > self.entries {
            return Err(InflightError::Size {
                region,
                queue: size,
            });
        }
        self.batch = Vec::with_capacity(usize::from(size));
        match version {
            0 => {
                self.initialise(size, used_idx);
                return Ok(Recovery {
                    fresh: true,
                    heads: Vec::new(),
                });
            }
            VERSION => {}
            other => return Err(InflightError::Version(other)),
        }
        self.finish_last_batch(desc_num, used_idx);
        let heads = self.in_flight(desc_num);
        if desc_num != size {
            if !heads.is_empty() {
                return Err(InflightError::Size {
                    region: desc_num,
                    queue: size,
                });
            }
            // The driver has reinitialised its queue with another size.
            self.header(DESC_NUM_OFFSET).store(size, Ordering::Release);
        }
        Ok(Recovery {
            fresh: false,
            heads,
        })
    }

    /// Initialises a region of zeroes. The region's used index must match that of the ring, because
    /// a difference would look like an interrupted batch.
    fn initialise(&mut self, size: u16, used_idx: u16) {
        (0..size).for_each(|head| self.inflight(head).store(0, Ordering::Relaxed));
        self.header(DESC_NUM_OFFSET).store(size, Ordering::Relaxed);
        self.header(LAST_BATCH_HEAD_OFFSET)
            .store(0, Ordering::Relaxed);
        self.header(USED_IDX_OFFSET)
            .store(used_idx, Ordering::Relaxed);
        self.header(VERSION_OFFSET)
            .store(VERSION, Ordering::Release);
    }

    /// Clears the marks of the last batch if it was published.
    fn finish_last_batch(&mut self, desc_num: u16, used_idx: u16) {
        self.last_batch_head = self.header(LAST_BATCH_HEAD_OFFSET).load(Ordering::Relaxed);
        let noted = self.header(USED_IDX_OFFSET).load(Ordering::Relaxed);
        let published = used_idx.wrapping_sub(noted);
        // A batch is never larger than the queue. A larger difference means that the ring was
        // reinitialised.
        if published <= desc_num {
            let mut head = self.last_batch_head;
            for _ in 0..published {
                if head >= desc_num {
                    break;
                }
                self.inflight(head).store(0, Ordering::Release);
                head = self.next(head).load(Ordering::Relaxed);
            }
        }
        self.header(USED_IDX_OFFSET)
            .store(used_idx, Ordering::Release);
    }

    /// Returns the heads in flight, ordered by their counters. Our counter continues after the
    /// last.
    fn in_flight(&mut self, desc_num: u16) -> Vec<u16> {
        let mut found: Vec<(u64, u16)> = (0..desc_num)
            .filter(|head| self.inflight(*head).load(Ordering::Relaxed) != 0)
            .map(|head| (self.counter_of(head).load(Ordering::Relaxed), head))
            .collect();
        found.sort_unstable();
        self.counter = found
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        found.into_iter().map(|(_, head)| head).collect()
    }

    /// Marks `head` as popped.
    #[inline]
    pub(crate) fn mark(&mut self, head: u16) {
        self.counter_of(head).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.inflight(head).store(1, Ordering::Release);
    }

    /// Records that `head` is answered but not published. At most as many heads as the queue has
    /// entries may be linked before the next publication.
    #[inline]
    pub(crate) fn link(&mut self, head: u16) {
        self.next(head)
            .store(self.last_batch_head, Ordering::Release);
        self.last_batch_head = head;
        self.header(LAST_BATCH_HEAD_OFFSET)
            .store(head, Ordering::Release);
        self.batch.push(head);
    }

    /// Records that all linked heads are published; `used_idx` is the index of the used ring.
    #[inline]
    pub(crate) fn published(&mut self, used_idx: u16) {
        while let Some(head) = self.batch.pop() {
            self.inflight(head).store(0, Ordering::Release);
        }
        self.header(USED_IDX_OFFSET)
            .store(used_idx, Ordering::Release);
    }

    #[inline(always)]
    fn header(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: within the region, 2-aligned, accessed only atomically.
        unsafe { shared_u16(self.base.add(offset)) }
    }

    /// Returns the address of an entry's field.
    #[inline(always)]
    fn entry(&self, head: u16, offset: usize) -> NonNull<u8> {
        assert!(head < self.entries, "heads are checked when popped");
        // SAFETY: within the region by the assertion.
        unsafe {
            self.base
                .add(HEADER_SIZE + usize::from(head) * ENTRY_SIZE + offset)
        }
    }

    #[inline(always)]
    fn next(&self, head: u16) -> &AtomicU16 {
        // SAFETY: within the region, 2-aligned, accessed only atomically.
        unsafe { shared_u16(self.entry(head, NEXT_OFFSET)) }
    }

    #[inline(always)]
    fn inflight(&self, head: u16) -> &AtomicU8 {
        // SAFETY: within the region, accessed only atomically.
        unsafe { AtomicU8::from_ptr(self.entry(head, INFLIGHT_OFFSET).as_ptr()) }
    }

    #[inline(always)]
    fn counter_of(&self, head: u16) -> &AtomicU64 {
        // SAFETY: within the region, 8-aligned, accessed only atomically.
        unsafe { AtomicU64::from_ptr(self.entry(head, COUNTER_OFFSET).as_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a zeroed region of 8 entries and a queue on it.
    fn region() -> (Arc<Vec<AtomicU64>>, InflightQueue) {
        let words = region_size(8) / 8;
        let region: Arc<Vec<AtomicU64>> = Arc::new((0..words).map(|_| AtomicU64::new(0)).collect());
        (region.clone(), on(&region))
    }

    fn on(region: &Arc<Vec<AtomicU64>>) -> InflightQueue {
        let base = NonNull::new(region.as_ptr() as *mut u8).unwrap();
        // SAFETY: atomics that `owner` keeps.
        unsafe { InflightQueue::new(base, 8, region.clone()) }
    }

    /// The values are those that `qemu` and `dpdk` compute for the same queue.
    #[test]
    fn regions_have_the_size_that_other_back_ends_give_them() {
        assert_eq!(region_size(128), 2112);
        assert_eq!(region_size(256), 4160);
        assert_eq!(region_size(1024), 16448);
    }

    #[test]
    fn a_region_is_laid_out_as_in_the_specification() {
        let (region, mut queue) = region();
        assert!(queue.recover(8, 0x1234).unwrap().fresh);
        queue.mark(2);
        queue.mark(5);
        queue.link(5);
        queue.published(0x1235);
        let bytes: Vec<u8> = region
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
            .collect();
        let u16_at = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        assert_eq!(u16_at(8), 1, "version");
        assert_eq!(u16_at(10), 8, "desc_num");
        assert_eq!(u16_at(12), 5, "last_batch_head");
        assert_eq!(u16_at(14), 0x1235, "used_idx");
        assert_eq!(bytes[16 + 2 * 16], 1, "desc[2].inflight");
        assert_eq!(bytes[16 + 5 * 16], 0, "desc[5].inflight");
        assert_eq!(bytes[16 + 2 * 16 + 8], 0, "desc[2].counter");
        assert_eq!(bytes[16 + 5 * 16 + 8], 1, "desc[5].counter");
    }

    #[test]
    fn heads_come_back_in_order_and_counters_go_on() {
        let (region, mut queue) = region();
        queue.recover(8, 0).unwrap();
        [7, 1, 4, 0].into_iter().for_each(|head| queue.mark(head));
        queue.link(1);
        queue.published(1);
        for _ in 0..2 {
            let mut successor = on(&region);
            let recovery = successor.recover(8, 1).unwrap();
            assert_eq!(recovery.heads, [7, 4, 0]);
            assert!(!recovery.fresh);
        }
        let mut successor = on(&region);
        successor.recover(8, 1).unwrap();
        successor.mark(1);
        assert_eq!(on(&region).recover(8, 1).unwrap().heads, [7, 4, 0, 1]);
    }

    /// A fresh region on a ring that has been in use: its used index of 0 does not indicate an
    /// interrupted batch.
    #[test]
    fn a_used_index_from_before_the_region_clears_nothing() {
        let (region, mut queue) = region();
        queue.recover(8, 3).unwrap();
        queue.mark(0);
        assert_eq!(on(&region).recover(8, 3).unwrap().heads, [0]);
    }

    #[test]
    fn an_interrupted_batch_is_finished() {
        let (region, mut queue) = region();
        queue.recover(8, 65535).unwrap();
        (0..4).for_each(|head| queue.mark(head));
        [2, 0, 3].into_iter().for_each(|head| queue.link(head));
        // Killed after the used ring's index went from 65535 to 2.
        let mut successor = on(&region);
        assert_eq!(successor.recover(8, 2).unwrap().heads, [1]);
        // Only once: a head that is in flight again is not taken for a part of the batch.
        successor.mark(0);
        assert_eq!(on(&region).recover(8, 2).unwrap().heads, [1, 0]);
    }

    #[test]
    fn an_interrupted_batch_may_have_all_of_the_queue_and_no_more() {
        for (used_idx, in_flight) in [(8, &[][..]), (9, &[0, 1, 2, 3, 4, 5, 6, 7])] {
            let (region, mut queue) = region();
            queue.recover(8, 0).unwrap();
            (0..8).for_each(|head| queue.mark(head));
            (0..8).for_each(|head| queue.link(head));
            // A larger difference means that the ring was reinitialised.
            let recovery = on(&region).recover(8, used_idx).unwrap();
            assert_eq!(recovery.heads, in_flight);
        }
    }

    #[test]
    fn a_ring_set_up_anew_finds_nothing_in_flight() {
        let (region, mut queue) = region();
        queue.recover(8, 1000).unwrap();
        queue.mark(0);
        queue.link(0);
        queue.published(1001);
        assert!(on(&region).recover(8, 0).unwrap().heads.is_empty());
        assert!(on(&region).recover(4, 0).unwrap().heads.is_empty());
    }

    #[test]
    fn a_region_of_another_queue_is_refused() {
        let (region, mut queue) = region();
        let too_large = InflightError::Size {
            region: 8,
            queue: 16,
        };
        assert_eq!(queue.recover(16, 0), Err(too_large));
        queue.recover(8, 0).unwrap();
        queue.mark(6);
        let in_use = InflightError::Size {
            region: 8,
            queue: 4,
        };
        assert_eq!(on(&region).recover(4, 0), Err(in_use));
        // Version 1 and nine entries, more than the region has room for.
        region[1].store(9 << 16 | 1, Ordering::Relaxed);
        let no_room = InflightError::Size {
            region: 9,
            queue: 8,
        };
        assert_eq!(on(&region).recover(8, 0), Err(no_room));
        region[1].store(2, Ordering::Relaxed);
        assert_eq!(on(&region).recover(8, 0), Err(InflightError::Version(2)));
    }

    /// A front-end may overwrite the region at any time.
    #[test]
    fn garbage_in_a_region_is_survived() {
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..2000 {
            let (region, _) = region();
            for word in region.iter() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                word.store(random, Ordering::Relaxed);
            }
            // Version 1 and eight entries; the rest stays random.
            let header = region[1].load(Ordering::Relaxed) & !0xffff_ffff;
            region[1].store(header | 8 << 16 | 1, Ordering::Relaxed);
            let mut queue = on(&region);
            let recovery = queue.recover(8, random as u16).unwrap();
            assert!(recovery.heads.len() <= 8);
            (0..8).for_each(|head| queue.mark(head));
            (0..8).for_each(|head| queue.link(head));
            queue.published(9);
        }
    }
}
