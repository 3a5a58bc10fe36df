//! Journal of entries that are in memory only, for the process that follows a killed one.
//!
//! A write that allocates completes before its entries are on disk; a guest that needs durability
//! flushes. But a guest can outlive this process, and the successor's reply to its next flush
//! covers that write, too. Therefore each changed entry is recorded in memory that the front-end
//! keeps, until a write-back has made the entry durable. (Written data is safe in the kernel. After
//! a power cut the guest is gone, and so is this memory.)
//!
//! Words of the header: magic; device and inode of the image; size of the disk; counters of the
//! first and of the next record; size that the disk is about to get. The records follow, of four
//! words each: kind and index, entry, bitmap of the entry, and a checksum of the three.

use fathom_core::{SAVED_STATE_ROOM, SavedState};
use std::sync::atomic::Ordering;

/// Maximum number of records: entries that can change between two write-backs.
const RECORDS: u64 = 32768;
const RECORD_WORDS: u64 = 4;
const HEADER_WORDS: u64 = 8;

/// Length of the journal in bytes.
pub(super) const LEN: u64 = (HEADER_WORDS + RECORDS * RECORD_WORDS) * 8;
const _: () = assert!(LEN <= SAVED_STATE_ROOM);

const MAGIC: u64 = u64::from_le_bytes(*b"FATHOMJ1");

/// Indexes of the header's words.
const AT_MAGIC: usize = 0;
const AT_IDENTITY: usize = 1;
const AT_FIRST: usize = 4;
const AT_NEXT: usize = 5;
/// Size in bytes that the disk is about to get; 0: none.
const AT_NEXT_SIZE: usize = 6;

/// Flag of the first word that marks records of L1 entries.
const L1: u64 = 1 << 63;

/// A changed entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// The L2 entry of this guest cluster: descriptor and bitmap.
    L2 {
        cluster: u64,
        entry: crate::qcow2::L2Entry,
    },
    L1 {
        index: u64,
        entry: u64,
    },
}

impl Record {
    fn words(self) -> [u64; 4] {
        let (what, one, two) = match self {
            Record::L2 { cluster, entry } => (cluster, entry.descriptor, entry.bitmap),
            Record::L1 { index, entry } => (L1 | index, entry, 0),
        };
        [what, one, two, check(what, one, two)]
    }

    fn of(words: [u64; 4]) -> Option<Record> {
        let [what, one, two, sum] = words;
        if sum != check(what, one, two) {
            return None;
        }
        Some(match what & L1 {
            0 => Record::L2 {
                cluster: what,
                entry: crate::qcow2::L2Entry {
                    descriptor: one,
                    bitmap: two,
                },
            },
            _ => Record::L1 {
                index: what & !L1,
                entry: one,
            },
        })
    }
}

fn check(what: u64, one: u64, two: u64) -> u64 {
    MAGIC ^ what ^ one.rotate_left(21) ^ two.rotate_left(42)
}

/// The disk that the records belong to: device, inode and size in bytes.
pub(super) type Identity = [u64; 3];

/// The contents of a predecessor's journal.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// No records; the predecessor had nothing in memory only.
    Nothing,
    /// The records in order.
    Records(Vec<Record>),
    /// This number of records belongs to another image.
    OfAnother(u64),
    /// The memory was overwritten by something that is no journal.
    Garbage,
}

/// A journal in use, behind the lock of the image's state.
pub(super) struct Journal {
    memory: SavedState,
    first: u64,
    next: u64,
    /// Number of records that are reserved and may still be written.
    reserved: u64,
}

impl Journal {
    /// Reads the journal that a predecessor has left.
    pub(super) fn look(memory: &SavedState, identity: Identity) -> Found {
        let words = memory.words();
        let word = |at: usize| words[at].load(Ordering::Acquire);
        if (words.len() as u64) * 8 < LEN || word(AT_MAGIC) == 0 {
            return Found::Nothing;
        }
        let (first, next) = (word(AT_FIRST), word(AT_NEXT));
        let count = next.wrapping_sub(first);
        if word(AT_MAGIC) != MAGIC || count > RECORDS {
            return Found::Garbage;
        }
        if count == 0 {
            return Found::Nothing;
        }
        let [device, inode, size] = identity;
        let sizes = [word(3), word(AT_NEXT_SIZE)];
        if [word(1), word(2)] != [device, inode] || !sizes.contains(&size) {
            return Found::OfAnother(count);
        }
        let record = |n: u64| {
            let at = place(first.wrapping_add(n));
            Record::of([word(at), word(at + 1), word(at + 2), word(at + 3)])
        };
        match (0..count).map(record).collect() {
            Some(records) => Found::Records(records),
            None => Found::Garbage,
        }
    }

    /// Takes over the memory; `None` if it is too small.
    ///
    /// Earlier records stay until the first [`Journal::forget`].
    pub(super) fn begin(memory: SavedState, identity: Identity) -> Option<Journal> {
        let words = memory.words();
        if (words.len() as u64) * 8 < LEN {
            return None;
        }
        let next = match words[AT_MAGIC].load(Ordering::Acquire) {
            MAGIC => words[AT_NEXT].load(Ordering::Acquire),
            _ => 0,
        };
        let first = match words[AT_MAGIC].load(Ordering::Acquire) {
            MAGIC => words[AT_FIRST].load(Ordering::Acquire),
            _ => 0,
        };
        for (at, value) in identity.into_iter().enumerate() {
            words[AT_IDENTITY + at].store(value, Ordering::Release);
        }
        words[AT_NEXT_SIZE].store(0, Ordering::Release);
        words[AT_FIRST].store(first, Ordering::Release);
        words[AT_NEXT].store(next, Ordering::Release);
        words[AT_MAGIC].store(MAGIC, Ordering::Release);
        Some(Journal {
            memory,
            first,
            next,
            reserved: 0,
        })
    }

    fn store(&self, at: usize, value: u64) {
        self.memory.words()[at].store(value, Ordering::Release);
    }

    /// Records the size that the disk is about to get.
    pub(super) fn announce_size(&self, size: u64) {
        self.store(AT_NEXT_SIZE, size);
    }

    /// Records the size that the disk now has for certain.
    pub(super) fn set_size(&self, size: u64) {
        self.store(AT_IDENTITY + 2, size);
        self.store(AT_NEXT_SIZE, 0);
    }

    /// Reserves room for `n` records, to be written or returned.
    ///
    /// False: there is no room before a write-back.
    pub(super) fn reserve(&mut self, n: u64) -> bool {
        let used = self.next.wrapping_sub(self.first);
        let fits = used + self.reserved + n <= RECORDS;
        self.reserved += if fits { n } else { 0 };
        fits
    }

    /// Returns reserved room.
    pub(super) fn unreserve(&mut self, n: u64) {
        self.reserved -= n;
    }

    /// Appends a record, for which room is reserved.
    pub(super) fn append(&mut self, record: Record) {
        let at = place(self.next);
        for (n, word) in record.words().into_iter().enumerate() {
            self.store(at + n, word);
        }
        self.next = self.next.wrapping_add(1);
        self.store(AT_NEXT, self.next);
    }

    /// Returns the present position, for [`Journal::forget`].
    pub(super) fn mark(&self) -> u64 {
        self.next
    }

    /// Removes all records before the mark, which are durable.
    pub(super) fn forget(&mut self, mark: u64) {
        self.first = mark;
        self.store(AT_FIRST, mark);
    }
}

/// Returns the index of the first word of record number `n`.
fn place(n: u64) -> usize {
    (HEADER_WORDS + n % RECORDS * RECORD_WORDS) as usize
}

/// The header's words come before the records.
const _: () = assert!(AT_NEXT_SIZE < HEADER_WORDS as usize);

/// Memory for tests; a clone of it serves as the successor's.
#[cfg(test)]
pub(super) fn memory() -> SavedState {
    let words: Vec<std::sync::atomic::AtomicU64> = (0..LEN / 8).map(|_| 0.into()).collect();
    let words = std::sync::Arc::new(words);
    let base = std::ptr::NonNull::from(&words[0]).cast();
    // SAFETY: the vector has this number of words and is kept.
    unsafe { SavedState::new(base, words.len(), words) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::L2Entry;

    const DISK: Identity = [1, 2, 3];

    fn record(n: u64) -> Record {
        match n % 3 {
            0 => Record::L1 { index: n, entry: 9 },
            _ => Record::L2 {
                cluster: n,
                entry: L2Entry {
                    descriptor: n << 16,
                    bitmap: n,
                },
            },
        }
    }

    #[test]
    fn a_successor_finds_what_was_not_forgotten() {
        let memory = memory();
        assert_eq!(Journal::look(&memory, DISK), Found::Nothing);
        let mut journal = Journal::begin(memory.clone(), DISK).unwrap();
        assert_eq!(Journal::look(&memory, DISK), Found::Nothing);
        let mut forgotten = 0;
        for n in 0..3 * RECORDS {
            assert!(journal.reserve(1));
            journal.unreserve(1);
            journal.append(record(n));
            if n % 100 == 50 {
                forgotten = journal.mark() - 10;
                journal.forget(forgotten);
            }
        }
        let Found::Records(found) = Journal::look(&memory, DISK) else {
            panic!("they are there");
        };
        assert!(
            found
                .iter()
                .copied()
                .eq((forgotten..3 * RECORDS).map(record))
        );
        assert!(matches!(Journal::look(&memory, [1, 2, 4]), Found::OfAnother(n) if n > 0));
        let mut next = Journal::begin(memory.clone(), DISK).unwrap();
        assert_eq!(Journal::look(&memory, DISK), Found::Records(found));
        next.forget(next.mark());
        assert_eq!(Journal::look(&memory, DISK), Found::Nothing);
    }

    #[test]
    fn there_is_room_for_so_many_and_no_more() {
        let mut journal = Journal::begin(memory(), DISK).unwrap();
        assert!(journal.reserve(RECORDS - 1));
        assert!(!journal.reserve(2));
        assert!(journal.reserve(1));
        journal.unreserve(1);
        journal.append(record(1));
        assert!(!journal.reserve(1));
        journal.forget(journal.mark());
        assert!(journal.reserve(1));
    }

    #[test]
    fn lies_are_garbage() {
        let memory = memory();
        let mut journal = Journal::begin(memory.clone(), DISK).unwrap();
        journal.append(record(1));
        let word = |at: usize| &memory.words()[at];
        word(place(0)).fetch_xor(1, Ordering::Relaxed);
        assert_eq!(Journal::look(&memory, DISK), Found::Garbage);
        word(place(0)).fetch_xor(1, Ordering::Relaxed);
        assert!(matches!(Journal::look(&memory, DISK), Found::Records(_)));
        word(AT_FIRST).store(5, Ordering::Relaxed);
        assert_eq!(Journal::look(&memory, DISK), Found::Garbage);
        word(AT_MAGIC).store(5, Ordering::Relaxed);
        assert_eq!(Journal::look(&memory, DISK), Found::Garbage);
    }
}
