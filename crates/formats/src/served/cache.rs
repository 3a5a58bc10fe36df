//! The slices of one image that are in memory.

use super::slice::Slice;
use super::tables::Pinned;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(super) struct Cache {
    slices: HashMap<u64, Arc<Slice>>,
    /// In the order in which they will be asked whether they can go.
    order: VecDeque<u64>,
    max: usize,
    /// Number of slices that have left it.
    evicted: u64,
}

/// How many slices are asked to go before the cache grows beyond its bounds:
/// what is dirty or in use cannot, and is bounded by the requests in flight
/// and by when metadata is written back.
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

    /// Lets go of everything; nobody uses the image.
    pub(super) fn clear(&mut self) {
        self.slices.clear();
        self.order.clear();
    }

    /// Lets go of slices that speak of nothing any more, and that nobody needs.
    pub(super) fn forget(&mut self, numbers: Range<u64>) {
        for number in numbers.clone() {
            if let Some(slice) = self.slices.remove(&number) {
                slice.live.store(false, Ordering::Release);
                self.evicted += 1;
            }
        }
        self.order.retain(|number| !numbers.contains(number));
    }

    /// Number of slices that have left the cache, over its life.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Slices that it holds at most while none must stay.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    pub(super) fn get(&self, number: u64) -> Option<Arc<Slice>> {
        let slice = self.slices.get(&number)?;
        slice.used.store(true, Ordering::Relaxed);
        Some(slice.clone())
    }

    /// The slice, to stay.
    pub(super) fn pin(&self, number: u64) -> Option<Pinned> {
        let slice = self.get(number)?;
        slice.pins.fetch_add(1, Ordering::Relaxed);
        Some(Pinned(slice))
    }

    /// Takes in a slice that it does not hold, to stay.
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

    /// Lets the next slice go, unless it was used since it was last asked.
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
