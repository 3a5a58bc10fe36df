//! An L1 table in memory that can grow while others read it.

use crate::HostOffset;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Number of entries that are allocated in memory together.
const CHUNK: usize = 4096;

type Chunk = OnceLock<Box<[AtomicU64]>>;

pub(super) struct L1 {
    /// Room for all entries that the table can ever have; chunks of present entries are allocated.
    chunks: Box<[Chunk]>,
    len: AtomicUsize,
    /// Offset of the table in the file.
    offset: AtomicU64,
}

impl L1 {
    /// Creates a table with these entries that can grow to `most` entries.
    pub(super) fn new(offset: HostOffset, entries: &[u64], most: usize) -> L1 {
        let most = most.max(entries.len());
        let chunks = std::iter::repeat_with(Chunk::new).take(most.div_ceil(CHUNK));
        let l1 = L1 {
            chunks: chunks.collect(),
            len: 0.into(),
            offset: offset.0.into(),
        };
        l1.moved(offset, entries.len());
        for (index, entry) in entries.iter().enumerate() {
            l1.entry(index).store(*entry, Ordering::Relaxed);
        }
        l1
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    pub(super) fn offset(&self) -> HostOffset {
        HostOffset(self.offset.load(Ordering::Acquire))
    }

    /// Returns the entry of an index within the table.
    pub(super) fn entry(&self, index: usize) -> &AtomicU64 {
        self.get(index).expect("the disk's tables are in it")
    }

    pub(super) fn get(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.len() {
            return None;
        }
        self.chunks[index / CHUNK].get()?.get(index % CHUNK)
    }

    /// Changes the offset in the file and the number of entries; new entries are 0.
    pub(super) fn moved(&self, offset: HostOffset, len: usize) {
        for chunk in &self.chunks[..len.div_ceil(CHUNK)] {
            chunk.get_or_init(|| (0..CHUNK).map(|_| AtomicU64::new(0)).collect());
        }
        self.offset.store(offset.0, Ordering::Release);
        self.len.store(len, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_keeps_its_entries_when_it_moves() {
        let entries: Vec<u64> = (1..6000).collect();
        let l1 = L1::new(HostOffset(512), &entries, 20_000);
        let place: *const AtomicU64 = l1.entry(5000);
        l1.moved(HostOffset(1024), 19_999);
        assert_eq!((l1.offset(), l1.len()), (HostOffset(1024), 19_999));
        assert_eq!(place, std::ptr::from_ref(l1.entry(5000)));
        for (index, entry) in (0..).zip(entries.iter().chain(&[0; 14_000])) {
            assert_eq!(l1.entry(index).load(Ordering::Relaxed), *entry);
        }
        assert!(l1.get(19_999).is_none());
    }
}
