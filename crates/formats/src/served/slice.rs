//! A cached part of an L2 table, read without locks.

use super::layout::Layout;
use crate::qcow2::L2Entry;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// L2 entries of consecutive guest clusters.
///
/// Entries change under the lock of the image's state only, and are read without it.
pub(super) struct Slice {
    /// Number of the slice, counted from the start of the guest's disk.
    pub(super) number: u64,
    words: Box<[AtomicU64]>,
    /// Number of words of an entry.
    per_entry: usize,
    /// Odd while an entry of two words changes.
    changing: AtomicU32,
    /// False once the slice was evicted: it must be looked up again.
    pub(super) live: AtomicBool,
    /// Whether the slice was looked up since the cache last considered it for eviction.
    pub(super) used: AtomicBool,
    /// Number of tasks that will change the slice, and of write-backs that use it. The cache does
    /// not evict a slice with pins. Raised under the lock of the image's state only.
    pub(super) pins: AtomicU32,
    /// Whether the slice differs from the file. Changes under the lock of the image's state only.
    pub(super) dirty: AtomicBool,
}

impl Slice {
    pub(super) fn parse(number: u64, bytes: &[u8], layout: &Layout) -> Slice {
        let (words, _) = bytes.as_chunks::<8>();
        Slice {
            number,
            words: words.iter().map(|w| layout.word(*w).into()).collect(),
            per_entry: layout.entry_words(),
            changing: AtomicU32::new(0),
            live: AtomicBool::new(true),
            used: AtomicBool::new(true),
            pins: AtomicU32::new(0),
            dirty: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn entry(&self, index: usize) -> L2Entry {
        if self.per_entry == 1 {
            return L2Entry {
                descriptor: self.words[index].load(Ordering::Acquire),
                bitmap: 0,
            };
        }
        loop {
            let before = self.changing.load(Ordering::Acquire);
            let entry = L2Entry {
                descriptor: self.words[2 * index].load(Ordering::Relaxed),
                bitmap: self.words[2 * index + 1].load(Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            if before & 1 == 0 && self.changing.load(Ordering::Relaxed) == before {
                return entry;
            }
            std::hint::spin_loop();
        }
    }

    /// Changes an entry. The caller holds the lock of the image's state and has marked the image
    /// dirty.
    pub(super) fn set(&self, index: usize, entry: L2Entry) {
        self.publish(index, entry);
        #[cfg(test)]
        super::race::reached(super::race::Point::Published);
    }

    fn publish(&self, index: usize, entry: L2Entry) {
        if self.per_entry == 1 {
            return self.words[index].store(entry.descriptor, Ordering::Release);
        }
        let count = self.changing.load(Ordering::Relaxed);
        self.changing
            .store(count.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.words[2 * index].store(entry.descriptor, Ordering::Relaxed);
        self.words[2 * index + 1].store(entry.bitmap, Ordering::Relaxed);
        self.changing
            .store(count.wrapping_add(2), Ordering::Release);
    }

    /// Encodes the slice as in the file. The caller holds the lock of the image's state.
    pub(super) fn encode(&self, layout: &Layout, out: &mut [u8]) {
        let (chunks, _) = out.as_chunks_mut::<8>();
        for (chunk, word) in chunks.iter_mut().zip(&self.words) {
            *chunk = layout.bytes(word.load(Ordering::Relaxed));
        }
    }
}
