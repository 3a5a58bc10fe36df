//! The slices of one image that are in memory.

use super::slice::Slice;
use super::tables::Pinned;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(super) struct Cache {
    slices: HashMap<u64, Arc<Slice>>,
    /// Slice numbers in the order in which they are considered for eviction.
    order: VecDeque<u64>,
    max: usize,
    /// Number of slices evicted so far.
    evicted: u64,
}

/// Maximum number of slices that are considered for eviction before the cache exceeds its limit.
///
/// Slices that are dirty or in use cannot be evicted. The number of these slices is limited by the
/// requests in flight and by the write-back of metadata.
const ASKED: usize = 64;

impl Cache {
    pub(super) fn new(max: usize) -> Cache {
        Cache {
            slices: HashMap::new(),
            order: VecDeque::new(),
            max,
            evicted: 0,
        }
    }

    /// Removes all slices. The image must not be in use.
    pub(super) fn clear(&mut self) {
        self.slices.clear();
        self.order.clear();
    }

    /// Removes slices that describe no part of the disk any more and that no task needs.
    pub(super) fn forget(&mut self, numbers: Range<u64>) {
        for number in numbers.clone() {
            if let Some(slice) = self.slices.remove(&number) {
                slice.live.store(false, Ordering::Release);
                self.evicted += 1;
            }
        }
        self.order.retain(|number| !numbers.contains(number));
    }

    /// Returns the number of slices evicted over the life of the cache.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the limit in slices, which only pinned and dirty slices may exceed.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    pub(super) fn get(&self, number: u64) -> Option<Arc<Slice>> {
        let slice = self.slices.get(&number)?;
        slice.used.store(true, Ordering::Relaxed);
        Some(slice.clone())
    }

    /// Returns the slice, pinned.
    pub(super) fn pin(&self, number: u64) -> Option<Pinned> {
        let slice = self.get(number)?;
        slice.pins.fetch_add(1, Ordering::Relaxed);
        Some(Pinned(slice))
    }

    /// Inserts a slice that is not in the cache, and pins it.
    pub(super) fn insert(&mut self, slice: Arc<Slice>) -> Pinned {
        let mut asked = 0;
        while self.slices.len() >= self.max && asked < ASKED {
            self.ask_next();
            asked += 1;
        }
        slice.pins.fetch_add(1, Ordering::Relaxed);
        self.order.push_back(slice.number);
        let earlier = self.slices.insert(slice.number, slice.clone());
        debug_assert!(earlier.is_none());
        Pinned(slice)
    }

    /// Evicts the next slice in order, unless it is pinned, dirty, or was used meanwhile.
    fn ask_next(&mut self) {
        let Some(number) = self.order.pop_front() else {
            return;
        };
        let slice = &self.slices[&number];
        let stays = slice.used.swap(false, Ordering::Relaxed)
            || slice.dirty.load(Ordering::Relaxed)
            || slice.pins.load(Ordering::Acquire) > 0;
        if stays {
            return self.order.push_back(number);
        }
        slice.live.store(false, Ordering::Release);
        self.slices.remove(&number);
        self.evicted += 1;
    }
}
