//! The tables of one qcow2 or QED image in use, shared by all workers.
//!
//! Looking an entry up takes no lock once a worker has the slice of the entry. Everything else is
//! behind one mutex that is never held across I/O.

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
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The kind and place of a guest range, according to this image alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// Data at this offset of the image's data storage.
    Data {
        at: HostOffset,
        /// Whether the data may be written in place.
        exclusive: bool,
    },
    Zero,
    /// Not in this image: reads as the backing image does.
    Below,
    /// A compressed cluster, which starts at this offset of the guest's disk.
    Compressed {
        cluster: GuestOffset,
        range: Compressed,
    },
}

/// The slice is not in memory, or its table is invalid; a task has to find out.
pub(super) struct Miss;

/// A part of the file that no entry refers to any more.
///
/// The refcounts of its clusters are lowered once the removal of the entry is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unlinked {
    /// Offset and length in bytes in the image's file; any clusters that these touch.
    pub(super) offset: HostOffset,
    pub(super) len: u64,
    /// Whether it was an L2 table. Until its release no guest data may be written there.
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

    /// Returns the clusters that it touches.
    pub(super) fn clusters(&self, bits: u32) -> Range<u64> {
        self.offset.clusters(self.len, bits)
    }
}

/// State behind the lock.
pub(super) struct State {
    pub(super) cache: Cache,
    pub(super) dirty_slices: Vec<Arc<Slice>>,
    /// Indexes of L1 entries that differ from the file.
    pub(super) dirty_l1: BTreeSet<usize>,
    pub(super) unlinked: Vec<Unlinked>,
    /// The header's first sector, to be written before anything else. `Some` after a failed header
    /// write, which may have reached the disk nevertheless.
    pub(super) header: Option<Vec<u8>>,
    pub(super) alloc: Allocator,
    /// `None` if no front-end would pass the journal to a successor.
    pub(super) journal: Option<Journal>,
}

impl State {
    /// Notes a part of the file that nothing refers to any more.
    ///
    /// A range of whole clusters is merged with the last one if they are adjacent. Otherwise the
    /// discard of a large disk would need memory for each of its clusters.
    pub(super) fn unlink(&mut self, gone: Option<Unlinked>, cluster_bits: u32) {
        let Some(gone) = gone else { return };
        // (Several compressed clusters may share a cluster; each of them counts as a reference.)
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
    /// Storage of the tables.
    pub(super) storage: StorageId,
    /// Storage of the guest data.
    pub(super) data: StorageId,
    /// Whether the guest data is in an external data file.
    pub(super) has_data_file: bool,
    /// Whether the guest data is encrypted: clusters never written read as random data.
    pub(super) is_encrypted: bool,
    pub(super) compression: CompressionType,
    /// Number of internal snapshots.
    pub(super) snapshots: u32,
    /// See [`Tables::size`].
    size: AtomicU64,
    /// Length of the file in bytes, as far as it was extended on purpose. Bounds the clusters of a
    /// QED image.
    pub(super) file_len: AtomicU64,
    /// End in bytes of the last cluster that was ever in use.
    pub(super) used: AtomicU64,
    /// Whether an attempt to make the file longer has failed.
    pub(super) cannot_extend: AtomicBool,
    pub(super) l1: L1,
    /// Whether any metadata is not durable.
    pub(super) dirty: DirtyState,
    pub(super) flushes: Flushes,
    /// Whether damage was found that ends all writes.
    pub(super) corrupt: AtomicBool,
    /// Whether an invalid entry was found.
    pub(super) bad_entry: AtomicBool,
    /// Whether clusters may be allocated that nothing uses: the image was not closed, or freed
    /// clusters could not be released.
    pub(super) may_leak: AtomicBool,
    /// Whether unreadable data was logged.
    pub(super) complained: AtomicBool,
    pub(super) writable: bool,
    pub(super) discard: bool,
    /// Whether clusters beyond the end of the file read as zeroes.
    pub(super) zero_missing: bool,
    pub(super) counts: Arc<ImageCounts>,
    pub(super) condition: Arc<ImageCondition>,
    /// Filter of the metadata regions behind the lock.
    pub(super) filter: Arc<Filter>,
    state: Mutex<State>,
    pub(super) packer: Packer,
    /// Slices that are being read.
    reading: RangeLocks,
    /// Guest clusters that are being allocated or freed.
    pub(super) allocating: RangeLocks,
    /// L2 tables that are being created.
    pub(super) making: RangeLocks,
    /// Held while the file is made longer.
    pub(super) extending: RangeLocks,
    /// Held during a search for free clusters.
    pub(super) searching: RangeLocks,
    pub(super) writing_back: RangeLocks,
    /// Batches of discards in flight, by their numbers.
    pub(super) discarding: RangeLocks,
    pub(super) discards: AtomicU64,
    /// Number of times that clusters freed by the guest became available.
    pub(super) given_up: AtomicU64,
}

/// A reservation in the journal, which ends when it is dropped.
///
/// Records that were written count twice until then. At worst this causes a write-back.
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

/// Numbers of flushes, in the order in which they begin. Only one flush runs at a time.
#[derive(Default)]
pub(super) struct Flushes {
    pub(super) begun: AtomicU64,
    /// Number of the last flush that succeeded.
    pub(super) done: AtomicU64,
}

/// A slice that stays in the cache until this is dropped.
pub(super) struct Pinned(pub(super) Arc<Slice>);

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, Ordering::Release);
    }
}

/// The parts from which the tables of an activated image are made.
pub(super) struct Parts {
    pub(super) layout: Layout,
    pub(super) file: Arc<dyn Storage>,
    pub(super) storage: StorageId,
    pub(super) data: StorageId,
    pub(super) has_data_file: bool,
    pub(super) is_encrypted: bool,
    pub(super) compression: CompressionType,
    pub(super) snapshots: u32,
    pub(super) size: u64,
    pub(super) file_len: u64,
    pub(super) l1_offset: HostOffset,
    pub(super) l1: Vec<u64>,
    /// Maximum number of L1 entries that the image can ever have.
    pub(super) most_l1: usize,
    pub(super) alloc: Allocator,
    /// Maximum number of slices in memory, except pinned and dirty ones.
    pub(super) max_slices: usize,
    pub(super) writable: bool,
    /// Whether freed clusters are discarded in the file.
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
            is_encrypted: parts.is_encrypted,
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

    /// Returns the size of the guest's disk in bytes; during a resize, the larger of both sizes.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::SeqCst);
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the number of the slice that describes a byte of the guest's disk.
    #[inline]
    pub(super) fn slice_of(&self, guest: GuestOffset) -> u64 {
        guest.cluster(self.layout.cluster_bits()) / self.layout.slice_entries()
    }

    /// Returns the index of the byte's entry in its slice.
    #[inline]
    pub(super) fn index_of(&self, guest: GuestOffset) -> usize {
        (guest.cluster(self.layout.cluster_bits()) & (self.layout.slice_entries() - 1)) as usize
    }

    /// Returns the L1 index of a slice's table.
    #[inline]
    pub(super) fn l1_index(&self, slice: u64) -> usize {
        (slice / self.layout.slices_per_table()) as usize
    }

    /// Returns the offset of the slice's table; `None` if there is no table.
    ///
    /// Offsets are checked each time, since the L1 table in memory is unchecked.
    pub(super) fn table_of(&self, slice: u64) -> Result<Option<HostOffset>, Problem> {
        let entry = self.l1.entry(self.l1_index(slice));
        let entry = entry.load(Ordering::Acquire);
        self.layout.table(entry, self.known_len())
    }

    /// Returns the offset of a slice in its table.
    pub(super) fn place_of(&self, slice: u64, table: HostOffset) -> HostOffset {
        let layout = &self.layout;
        table + slice % layout.slices_per_table() * layout.slice_bytes()
    }

    /// Returns what the bytes from `guest` on are, by their slice, and for how many bytes.
    ///
    /// `max` is the maximum number of bytes and not 0; `guest` and `max` are within the disk.
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
        // At the end of a cluster, the next cluster may continue the extent.
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

    /// Does the same as [`Tables::extent`] within the cluster of `guest`.
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

    /// Returns the extent of a guest range for which there is no L2 table.
    #[inline]
    pub(super) fn without_table(&self, guest: GuestOffset, max: u64) -> (Extent, u64) {
        let covered = self.layout.slice_entries() << self.layout.cluster_bits();
        (Extent::Below, max.min(covered - guest.within(covered)))
    }

    /// Returns the slice if it is in memory, or no slice if there is no table.
    ///
    /// Also returns the number of slices evicted so far.
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

    /// Returns the slice, pinned, and reads it if it is not in the cache.
    ///
    /// `None`: there is no table.
    pub(super) async fn slice(&self, io: &impl Io, number: u64) -> Result<Option<Pinned>, Errno> {
        if let Some(slice) = self.state().cache.pin(number) {
            return Ok(Some(slice));
        }
        // Only one task reads a slice, so that no task inserts an outdated copy.
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

    /// Reserves room in the journal for `n` changes of entries.
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

    /// Unwraps a decoded L2 entry. For an invalid entry, marks the image and returns EIO.
    pub(super) fn checked_entry<T>(&self, result: Result<T, Problem>) -> Result<T, Errno> {
        result.map_err(|problem| {
            self.mark_bad_entry(&problem);
            libc::EIO
        })
    }

    /// Unwraps a result. For a problem, marks the image as corrupt and returns EIO.
    pub(super) fn checked<T>(&self, result: Result<T, Problem>) -> Result<T, Errno> {
        result.map_err(|problem| {
            self.mark_corrupt(&problem);
            libc::EIO
        })
    }

    /// Changes an entry. The caller has reserved room in the journal and has pinned the slice.
    pub(super) fn link(&self, state: &mut State, slice: &Pinned, index: usize, entry: L2Entry) {
        if let Some(journal) = &mut state.journal {
            let cluster = slice.0.number * self.layout.slice_entries() + index as u64;
            journal.append(Record::L2 { cluster, entry });
        }
        self.set_entry(state, slice, index, entry);
    }

    /// Changes an entry that is in the journal already.
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

    /// Notes that metadata differs from the file.
    ///
    /// Takes the locked state, since a write-back copies under that lock.
    pub(super) fn set_dirty(&self, _: &mut State) {
        self.dirty.set();
    }
}
