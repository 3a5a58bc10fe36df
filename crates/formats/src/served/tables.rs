//! One qcow2 or QED image while it is in use: its tables, as far as they are
//! in memory, shared by all workers.
//!
//! Looking an entry up takes no lock once a worker has the slice that it is
//! in. Everything else is behind one mutex that is never held across I/O.

use super::alloc::Allocator;
use super::cache::Cache;
use super::compress::Packer;
use super::condition::ImageCondition;
use super::counts::ImageCounts;
use super::dirty_state::DirtyState;
use super::io::{Errno, Io, StorageId};
use super::journal::{Journal, Record};
use super::l1::L1;
use super::layout::{EXCLUSIVE, Layout, Problem};
use super::locks::RangeLocks;
use super::metadata::Filter;
use super::slice::Slice;
use super::storage::Storage;
use crate::qcow2::{Cluster, Compressed, CompressionType, L2Entry};
use crate::{GuestOffset, HostOffset};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a guest range is, as far as this image knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// At this offset of the image's data storage.
    Data {
        at: HostOffset,
        /// May be written in place.
        exclusive: bool,
    },
    Zero,
    /// As in the backing file.
    Below,
    /// A compressed cluster, which starts at this offset of the guest's disk.
    Compressed {
        cluster: GuestOffset,
        range: Compressed,
    },
}

/// The slice is not in memory, or cannot be found: a task will tell.
pub(super) struct Miss;

/// What was linked and is not any more; its refcounts go down once that is
/// durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unlinked {
    /// Offset and bytes in the image's file; any clusters they touch.
    pub(super) offset: HostOffset,
    pub(super) len: u64,
    /// An L2 table, which no write may hit as long as it was one.
    pub(super) is_table: bool,
}

impl Unlinked {
    pub(super) fn new(offset: HostOffset, len: u64) -> Unlinked {
        Unlinked {
            offset,
            len,
            is_table: false,
        }
    }

    /// Those that it touches.
    pub(super) fn clusters(&self, bits: u32) -> Range<u64> {
        self.offset.clusters(self.len, bits)
    }
}

/// Behind the lock.
pub(super) struct State {
    pub(super) cache: Cache,
    pub(super) dirty_slices: Vec<Arc<Slice>>,
    /// Indexes of L1 entries that are not as on disk.
    pub(super) dirty_l1: BTreeSet<usize>,
    pub(super) unlinked: Vec<Unlinked>,
    /// The header's first sector, which has to be written before anything else: a change of it has
    /// failed, and may be on the disk nevertheless.
    pub(super) header: Option<Vec<u8>>,
    pub(super) alloc: Allocator,
    /// None: nobody would give it to a successor.
    pub(super) journal: Option<Journal>,
}

impl State {
    /// Notes what is no longer referred to. Whole clusters that follow those noted last join them: a discard of a large
    /// disk must not take memory for each of its clusters.
    pub(super) fn unlink(&mut self, gone: Option<Unlinked>, cluster_bits: u32) {
        let Some(gone) = gone else { return };
        // (Several pieces may share a cluster, and each of them is counted.)
        let is_whole =
            |part: &Unlinked| (part.offset.0 | part.len) & ((1 << cluster_bits) - 1) == 0;
        match self.unlinked.last_mut() {
            Some(last)
                if !last.is_table
                    && !gone.is_table
                    && last.offset + last.len == gone.offset
                    && is_whole(last)
                    && is_whole(&gone) =>
            {
                last.len += gone.len;
            }
            _ => self.unlinked.push(gone),
        }
    }
}

pub(super) struct Tables {
    pub(super) layout: Layout,
    /// See [`Layout::not_plain`].
    not_plain: u64,
    pub(super) file: Arc<dyn Storage>,
    /// Where tables are.
    pub(super) storage: StorageId,
    /// Where guest data is.
    pub(super) data: StorageId,
    /// That is in another file.
    pub(super) has_data_file: bool,
    /// That is encrypted there: what was never written reads as anything.
    pub(super) is_sealed: bool,
    pub(super) compression: CompressionType,
    /// So many internal snapshots there are.
    pub(super) snapshots: u32,
    /// See [`Tables::size`].
    size: AtomicU64,
    /// Of the file, in bytes, as far as it was made longer on purpose; bounds
    /// a QED image's clusters.
    pub(super) file_len: AtomicU64,
    /// Where the last cluster ends that was ever in use.
    pub(super) used: AtomicU64,
    /// Making the file longer has failed.
    pub(super) cannot_extend: AtomicBool,
    pub(super) l1: L1,
    /// Whether any metadata is not on disk.
    pub(super) dirty: DirtyState,
    pub(super) flushes: Flushes,
    /// Something was found that must not be: nothing is written any more.
    pub(super) corrupt: AtomicBool,
    /// An entry was found that cannot be followed.
    pub(super) bad_entry: AtomicBool,
    /// Clusters may be allocated that nothing uses: the image was not closed, or what was freed could not be given back.
    pub(super) may_leak: AtomicBool,
    /// Unreadable data was reported.
    pub(super) complained: AtomicBool,
    pub(super) writable: bool,
    pub(super) discard: bool,
    /// Clusters behind the file's end read as zeroes.
    pub(super) zero_missing: bool,
    pub(super) counts: Arc<ImageCounts>,
    pub(super) condition: Arc<ImageCondition>,
    /// Of the metadata behind the lock.
    pub(super) filter: Arc<Filter>,
    state: Mutex<State>,
    pub(super) packer: Packer,
    /// Slices that are being read.
    reading: RangeLocks,
    /// Guest clusters that are being allocated or freed.
    pub(super) allocating: RangeLocks,
    /// L2 tables that are being made.
    pub(super) making: RangeLocks,
    /// The file, when it is made longer.
    pub(super) extending: RangeLocks,
    /// The search for free clusters, and writing back.
    pub(super) searching: RangeLocks,
    pub(super) writing_back: RangeLocks,
    /// Batches of discards in flight, by their numbers.
    pub(super) discarding: RangeLocks,
    pub(super) discards: AtomicU64,
    /// Counts the times that clusters the guest had given up became free.
    pub(super) given_up: AtomicU64,
}

/// Gives room in the journal back, also what was used of it: until then that
/// counts twice, which costs a write-back at worst.
pub(super) struct Room<'a> {
    tables: &'a Tables,
    records: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if let Some(journal) = &mut self.tables.state().journal {
            journal.unreserve(self.records);
        }
    }
}

/// Flushes are numbered as they begin; one at a time does.
#[derive(Default)]
pub(super) struct Flushes {
    pub(super) begun: AtomicU64,
    /// The last that succeeded.
    pub(super) done: AtomicU64,
}

/// A slice that stays in the cache.
pub(super) struct Pinned(pub(super) Arc<Slice>);

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, Ordering::Release);
    }
}

/// The parts of an active image.
pub(super) struct Parts {
    pub(super) layout: Layout,
    pub(super) file: Arc<dyn Storage>,
    pub(super) storage: StorageId,
    pub(super) data: StorageId,
    pub(super) has_data_file: bool,
    pub(super) is_sealed: bool,
    pub(super) compression: CompressionType,
    pub(super) snapshots: u32,
    pub(super) size: u64,
    pub(super) file_len: u64,
    pub(super) l1_offset: HostOffset,
    pub(super) l1: Vec<u64>,
    /// Entries that it can come to have.
    pub(super) most_l1: usize,
    pub(super) alloc: Allocator,
    /// Slices in memory at most, while none of them must stay.
    pub(super) max_slices: usize,
    pub(super) writable: bool,
    /// What is given back is deallocated in the file, too.
    pub(super) discard: bool,
    pub(super) zero_missing: bool,
    pub(super) counts: Arc<ImageCounts>,
    pub(super) condition: Arc<ImageCondition>,
}

impl Tables {
    pub(super) fn new(parts: Parts) -> Tables {
        Tables {
            layout: parts.layout,
            not_plain: parts.layout.not_plain(),
            file: parts.file,
            storage: parts.storage,
            data: parts.data,
            has_data_file: parts.has_data_file,
            is_sealed: parts.is_sealed,
            compression: parts.compression,
            snapshots: parts.snapshots,
            size: parts.size.into(),
            file_len: parts.file_len.into(),
            used: parts.file_len.into(),
            cannot_extend: AtomicBool::new(false),
            l1: L1::new(parts.l1_offset, &parts.l1, parts.most_l1),
            dirty: DirtyState::default(),
            flushes: Flushes::default(),
            corrupt: AtomicBool::new(false),
            bad_entry: AtomicBool::new(false),
            may_leak: AtomicBool::new(false),
            complained: AtomicBool::new(false),
            writable: parts.writable,
            discard: parts.discard,
            zero_missing: parts.zero_missing,
            counts: parts.counts,
            condition: parts.condition,
            filter: parts.alloc.metadata.filter(),
            state: Mutex::new(State {
                cache: Cache::new(parts.max_slices),
                dirty_slices: Vec::new(),
                dirty_l1: BTreeSet::new(),
                unlinked: Vec::new(),
                header: None,
                alloc: parts.alloc,
                journal: None,
            }),
            packer: Packer::default(),
            reading: RangeLocks::default(),
            allocating: RangeLocks::default(),
            making: RangeLocks::default(),
            extending: RangeLocks::default(),
            searching: RangeLocks::default(),
            writing_back: RangeLocks::default(),
            discarding: RangeLocks::default(),
            discards: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
        }
    }

    /// Of the guest's disk, in bytes. While it is being resized, the larger of both.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::SeqCst);
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the slice that speaks of a byte of the guest's disk.
    #[inline]
    pub(super) fn slice_of(&self, guest: GuestOffset) -> u64 {
        guest.cluster(self.layout.cluster_bits()) / self.layout.slice_entries()
    }

    /// Where in its slice.
    #[inline]
    pub(super) fn index_of(&self, guest: GuestOffset) -> usize {
        (guest.cluster(self.layout.cluster_bits()) & (self.layout.slice_entries() - 1)) as usize
    }

    /// The L1 index of a slice's table.
    #[inline]
    pub(super) fn l1_index(&self, slice: u64) -> usize {
        (slice / self.layout.slices_per_table()) as usize
    }

    /// Where the slice's table is. Offsets are checked each time: the L1
    /// table is as the file has it.
    pub(super) fn table_of(&self, slice: u64) -> Result<Option<HostOffset>, Problem> {
        let entry = self.l1.entry(self.l1_index(slice));
        let entry = entry.load(Ordering::Acquire);
        self.layout.table(entry, self.known_len())
    }

    /// What a table's offset means for one of its slices.
    pub(super) fn place_of(&self, slice: u64, table: HostOffset) -> HostOffset {
        let layout = &self.layout;
        table + slice % layout.slices_per_table() * layout.slice_bytes()
    }

    /// What `guest` and up to `max` bytes from there on are, by the slice
    /// that speaks of it: also how many bytes that is true for. Both are
    /// within the disk and `max` is not 0.
    #[inline]
    pub(super) fn extent(
        &self,
        slice: &Slice,
        guest: GuestOffset,
        max: u64,
    ) -> Result<(Extent, u64), Problem> {
        let size = self.layout.cluster_size();
        let mut index = self.index_of(guest);
        let inner = guest.within(size);
        let word = slice.entry(index).descriptor;
        if word & self.not_plain == 0 && word & !EXCLUSIVE != 0 && inner + max <= size {
            let data = Extent::Data {
                at: HostOffset(word & !EXCLUSIVE) + inner,
                exclusive: word & EXCLUSIVE != 0,
            };
            return Ok((data, max));
        }
        let (extent, mut len) = self.within_cluster(slice.entry(index), guest)?;
        // A cluster's end: what follows may go on where this ends.
        while len < max && (guest + len).within(size) == 0 {
            index += 1;
            if index as u64 == self.layout.slice_entries() {
                break;
            }
            let (next, more) = self.within_cluster(slice.entry(index), guest + len)?;
            let goes_on = match (extent, next) {
                (
                    Extent::Data { at, exclusive },
                    Extent::Data {
                        at: next,
                        exclusive: also,
                    },
                ) => at + len == next && exclusive == also,
                (Extent::Zero, Extent::Zero) | (Extent::Below, Extent::Below) => true,
                _ => false,
            };
            if !goes_on {
                break;
            }
            len += more;
        }
        Ok((extent, len.min(max)))
    }

    /// The same within the cluster that `guest` is in.
    #[inline]
    fn within_cluster(&self, entry: L2Entry, guest: GuestOffset) -> Result<(Extent, u64), Problem> {
        let size = self.layout.cluster_size();
        let inner = guest.within(size);
        let file_len = self.file_len.load(Ordering::Relaxed);
        let data = |host: HostOffset| Extent::Data {
            at: host + inner,
            exclusive: self.layout.is_exclusive(entry),
        };
        let extent = match self.layout.decode(entry, guest, file_len)? {
            Cluster::Data { host } => data(host),
            Cluster::Unallocated => Extent::Below,
            Cluster::Zero { .. } => Extent::Zero,
            Cluster::Compressed(range) => Extent::Compressed {
                cluster: guest.down_to(size),
                range,
            },
            Cluster::Subclusters {
                host,
                allocated,
                zero,
            } => {
                let unit = self.layout.unit();
                let first = (inner / unit) as u32;
                let bit = |mask: u32| mask >> first & 1 == 1;
                let (extent, alike) = match host {
                    Some(host) if bit(allocated) => (data(host), allocated),
                    _ if bit(zero) => (Extent::Zero, zero),
                    _ => (Extent::Below, !(allocated | zero)),
                };
                let units = (alike >> first).trailing_ones();
                return Ok((extent, u64::from(first + units) * unit - inner));
            }
        };
        Ok((extent, size - inner))
    }

    /// Extents of a guest range for which there is no L2 table.
    #[inline]
    pub(super) fn without_table(&self, guest: GuestOffset, max: u64) -> (Extent, u64) {
        let covered = self.layout.slice_entries() << self.layout.cluster_bits();
        (Extent::Below, max.min(covered - guest.within(covered)))
    }

    /// Returns the slice if it is in memory, or no slice if there is no table; and how many slices have left the cache
    /// so far.
    pub(super) fn cached(&self, number: u64) -> (Result<Option<Arc<Slice>>, Miss>, u64) {
        let state = self.state();
        let (slice, evicted) = (state.cache.get(number), state.cache.evicted());
        drop(state);
        let found = slice.map(Some).ok_or(Miss);
        let found = found.or_else(|miss| match self.table_of(number) {
            Ok(None) => Ok(None),
            Ok(Some(_)) | Err(_) => Err(miss),
        });
        (found, evicted)
    }

    /// The slice, read if need be, to stay in the cache while the guard
    /// lives. None: there is no table.
    pub(super) async fn slice(&self, io: &impl Io, number: u64) -> Result<Option<Pinned>, Errno> {
        if let Some(slice) = self.state().cache.pin(number) {
            return Ok(Some(slice));
        }
        // One reads, so that nobody puts back what has changed meanwhile.
        let _reading = self.reading.lock(number..number + 1).await;
        if let Some(slice) = self.state().cache.pin(number) {
            return Ok(Some(slice));
        }
        let Some(table) = self.checked(self.table_of(number))? else {
            return Ok(None);
        };
        let at = self.place_of(number, table);
        let len = self.layout.slice_bytes() as usize;
        let bytes = io.read(self.storage, at, len).await?;
        self.counts.read_table();
        let slice = Slice::parse(number, bytes.bytes(), &self.layout);
        let mut state = self.state();
        Ok(Some(state.cache.insert(Arc::new(slice))))
    }

    /// Room in the journal for `n` entries that are going to change.
    pub(super) async fn make_room(&self, io: &impl Io, n: u64) -> Result<Room<'_>, Errno> {
        while !self.has_room(n) {
            self.write_back_now(io).await?;
        }
        Ok(Room {
            tables: self,
            records: n,
        })
    }

    fn has_room(&self, n: u64) -> bool {
        let journal = &mut self.state().journal;
        journal.as_mut().is_none_or(|journal| journal.reserve(n))
    }

    /// Returns what an entry of an L2 table means. If it cannot be followed, the request fails, and the image is marked.
    pub(super) fn checked_entry<T>(&self, result: Result<T, Problem>) -> Result<T, Errno> {
        result.map_err(|problem| {
            self.mark_bad_entry(&problem);
            libc::EIO
        })
    }

    /// A problem in the image: it is marked, and the request fails.
    pub(super) fn checked<T>(&self, result: Result<T, Problem>) -> Result<T, Errno> {
        result.map_err(|problem| {
            self.mark_corrupt(&problem);
            libc::EIO
        })
    }

    /// Changes an entry, for which there is room in the journal. The slice is
    /// pinned.
    pub(super) fn link(&self, state: &mut State, slice: &Pinned, index: usize, entry: L2Entry) {
        if let Some(journal) = &mut state.journal {
            let cluster = slice.0.number * self.layout.slice_entries() + index as u64;
            journal.append(Record::L2 { cluster, entry });
        }
        self.set_entry(state, slice, index, entry);
    }

    /// Changes an entry that is in the journal.
    pub(super) fn set_entry(
        &self,
        state: &mut State,
        slice: &Pinned,
        index: usize,
        entry: L2Entry,
    ) {
        // Before the entry is published: see `DirtyState`.
        self.set_dirty(state);
        slice.0.set(index, entry);
        if !slice.0.dirty.swap(true, Ordering::Relaxed) {
            state.dirty_slices.push(slice.0.clone());
        }
    }

    /// Notes that metadata differs from the file. Takes the locked state, since a write-back copies under that lock.
    pub(super) fn set_dirty(&self, _: &mut State) {
        self.dirty.set();
    }
}
