//! Writes metadata to the disk in an order that survives power cuts.
//!
//! A power cut at any instant leaves a sound image:
//!
//! 1. refcounts, then a barrier, which also covers guest data and new, empty tables; a moved
//!    refcount table costs barriers of its own;
//! 2. L2 and L1 entries, then a barrier;
//! 3. in memory, the release of what these entries no longer refer to; the next write-back writes
//!    the lower refcounts.
//!
//! All that is written was copied at one instant, under the lock. An entry changed later, whose
//! refcount is not yet written, cannot be among it.
//!
//! The image is sound at any instant. Lazy refcounts are therefore not needed: an image whose
//! header allows them is served like all others.

use super::alloc::{Moved, refcounts};
use super::io::{Buf, Errno, Io};
use super::journal::Journal;
use super::slice::Slice;
use super::tables::{Tables, Unlinked};
use crate::HostOffset;
use fathom_core::Op;
use fathom_units::cause;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The metadata that differs from the disk, as of one instant.
struct Dirty {
    slices: Vec<(Arc<Slice>, Buf)>,
    l1: Vec<usize>,
    /// Sectors of the L1 table with these entries, and their offsets.
    l1_sectors: Vec<(HostOffset, Buf)>,
    refcounts: Vec<(HostOffset, Vec<u8>)>,
    table: Option<(HostOffset, Vec<u8>)>,
    moved: Option<Moved>,
    unlinked: Vec<Unlinked>,
    /// Position in the journal before which all records are covered.
    mark: Option<u64>,
}

/// Number of L1 entries that are written together.
const L1_PER_SECTOR: usize = 64;

/// Maximum number of attempts to find room.
const RECLAIM_ATTEMPTS: usize = 16;

impl Tables {
    /// Makes everything durable that has completed, metadata and data.
    pub(super) async fn flush(&self, io: &impl Io) -> Result<(), Errno> {
        let arrived = self.flushes.begun.load(Ordering::SeqCst);
        // A flush that began after this one arrived covers everything that this one would.
        let covered = || self.flushes.done.load(Ordering::SeqCst) > arrived;
        let Some(_alone) = self.writing_back.lock_all_unless(covered).await else {
            return Ok(());
        };
        let number = self.flushes.begun.fetch_add(1, Ordering::SeqCst) + 1;
        match self.dirty.is_dirty() {
            true => self.write_back(io).await?,
            false => self.barrier(io).await?,
        }
        self.flushes.done.store(number, Ordering::SeqCst);
        Ok(())
    }

    /// Writes metadata back if dirty slices take too much of the cache.
    pub(super) async fn limit_dirty(&self, io: &impl Io) -> Result<(), Errno> {
        let is_little = || {
            let state = self.state();
            state.dirty_slices.len() <= state.cache.max() / 4
        };
        match self.writing_back.lock_all_unless(is_little).await {
            Some(_alone) => self.write_back(io).await,
            None => Ok(()),
        }
    }

    /// Writes metadata back to make room in the journal.
    pub(super) async fn write_back_now(&self, io: &impl Io) -> Result<(), Errno> {
        let _alone = self.writing_back.lock_all().await;
        self.write_back(io).await
    }

    /// Makes room for a write that found none.
    ///
    /// Clusters that the guest has freed can be used once that is durable and no request in flight
    /// may use them. Each attempt gives requests time to end. `before` is the value of `given_up`
    /// before the write, since another task may have made room meanwhile. Fails with ENOSPC if no
    /// room could be made.
    pub(super) async fn reclaim(&self, io: &impl Io, before: u64) -> Result<(), Errno> {
        for _ in 0..RECLAIM_ATTEMPTS {
            let alone = self.writing_back.lock_all().await;
            if self.given_up.load(Ordering::Acquire) != before {
                return Ok(());
            }
            if !self.has_given_up() {
                break;
            }
            self.write_back(io).await?;
            drop(alone);
            self.discard_freed(io).await;
            // Other tasks may be discarding the free clusters.
            drop(self.discarding.lock_all().await);
        }
        match self.given_up.load(Ordering::Acquire) == before {
            true => Err(libc::ENOSPC),
            false => Ok(()),
        }
    }

    /// Returns whether clusters wait to become free.
    fn has_given_up(&self) -> bool {
        let mut state = self.state();
        let freed = refcounts(&mut state).is_some_and(|space| space.has_freed());
        freed || !state.unlinked.is_empty()
    }

    /// Writes all dirty metadata. The caller holds the lock for writing back.
    pub(super) async fn write_back(&self, io: &impl Io) -> Result<(), Errno> {
        if !self.is_whole() {
            return Err(libc::EIO);
        }
        self.settle_header(io).await?;
        let mut dirty = self.take_dirty()?;
        let written = self.write(io, &mut dirty).await;
        if let Err(errno) = written {
            self.restore(dirty);
            self.dirty.end_write_back();
            return Err(errno);
        }
        for (slice, _) in &dirty.slices {
            slice.pins.fetch_sub(1, Ordering::Release);
        }
        if let (Some(mark), Some(journal)) = (dirty.mark, &mut self.state().journal) {
            journal.forget(mark);
        }
        self.dirty.end_write_back();
        self.free_unlinked(io, dirty).await
    }

    /// Copies the dirty metadata, which counts as clean from now on.
    fn take_dirty(&self) -> Result<Dirty, Errno> {
        if self.corrupt.load(Ordering::Relaxed) {
            return Err(libc::EIO);
        }
        let mut state = self.state();
        let state = &mut *state;
        self.dirty.begin_write_back();
        let slices = std::mem::take(&mut state.dirty_slices);
        let copy = |slice: Arc<Slice>| {
            slice.dirty.store(false, Ordering::Relaxed);
            slice.pins.fetch_add(1, Ordering::Relaxed);
            let mut buf = Buf::new(self.layout.slice_bytes() as usize);
            slice.encode(&self.layout, buf.bytes_mut());
            (slice, buf)
        };
        let l1: Vec<usize> = std::mem::take(&mut state.dirty_l1).into_iter().collect();
        let mut dirty = Dirty {
            slices: slices.into_iter().map(copy).collect(),
            l1_sectors: self.l1_sectors(&l1),
            l1,
            refcounts: Vec::new(),
            table: None,
            moved: None,
            unlinked: std::mem::take(&mut state.unlinked),
            mark: state.journal.as_ref().map(Journal::mark),
        };
        if let Some(refcounts) = refcounts(state) {
            let taken = refcounts.take_dirty();
            (dirty.refcounts, dirty.table, dirty.moved) = (taken.blocks, taken.table, taken.moved);
        }
        Ok(dirty)
    }

    async fn write(&self, io: &impl Io, dirty: &mut Dirty) -> Result<(), Errno> {
        let blocks: Vec<_> = dirty
            .refcounts
            .iter()
            .map(|(at, bytes)| io.write(self.storage, *at, copied(bytes)))
            .collect();
        all(blocks).await?;
        if let Some((at, bytes)) = &dirty.table {
            self.barrier(io).await?;
            io.write(self.storage, *at, copied(bytes)).await?;
        }
        self.barrier(io).await?;
        if let (Some(_), Some((at, bytes))) = (&dirty.moved, &dirty.table) {
            self.point_header(io, *at, bytes.len() as u64).await?;
            self.barrier(io).await?;
        }
        if dirty.slices.is_empty() && dirty.l1.is_empty() {
            return Ok(());
        }
        let mut writes = Vec::new();
        for (slice, buf) in &mut dirty.slices {
            let buf = std::mem::replace(buf, Buf::new(0));
            let table = self.checked(self.table_of(slice.number))?;
            let table = table.expect("what has slices has a table");
            writes.push(io.write(self.storage, self.place_of(slice.number, table), buf));
        }
        for (at, buf) in std::mem::take(&mut dirty.l1_sectors) {
            writes.push(io.write(self.storage, at, buf));
        }
        all(writes).await?;
        self.barrier(io).await
    }

    /// Copies the sectors of the L1 table that hold these entries.
    fn l1_sectors(&self, indexes: &[usize]) -> Vec<(HostOffset, Buf)> {
        let mut sectors: Vec<usize> = indexes.iter().map(|i| i / L1_PER_SECTOR).collect();
        sectors.dedup();
        let copy = |sector: usize| {
            let first = sector * L1_PER_SECTOR;
            let entries = (first..first + L1_PER_SECTOR).map_while(|index| self.l1.get(index));
            // The table owns the rest of its last cluster, too.
            let mut buf = Buf::new(L1_PER_SECTOR * 8);
            let (words, _) = buf.bytes_mut().as_chunks_mut::<8>();
            for (word, entry) in words.iter_mut().zip(entries) {
                *word = self.layout.bytes(entry.load(Ordering::Acquire));
            }
            (self.l1.offset() + first as u64 * 8, buf)
        };
        sectors.into_iter().map(copy).collect()
    }

    /// Makes all completed writes durable, in all files that are written.
    pub(super) async fn barrier(&self, io: &impl Io) -> Result<(), Errno> {
        let own = io.plain(self.storage, Op::Flush, HostOffset(0), 0);
        if self.has_data_file {
            io.plain(self.data, Op::Flush, HostOffset(0), 0).await?;
        }
        own.await
    }

    /// Writes the offset and the size of the refcount table to the header.
    ///
    /// Both fields are in bytes 48 to 59 of the first sector, which is written wholly or not at
    /// all.
    async fn point_header(&self, io: &impl Io, at: HostOffset, len: u64) -> Result<(), Errno> {
        let mut sector = io.read(self.storage, HostOffset(0), 512).await?;
        let bytes = sector.bytes_mut();
        bytes[48..56].copy_from_slice(&at.0.to_be_bytes());
        let clusters = (len >> self.layout.cluster_bits()) as u32;
        bytes[56..60].copy_from_slice(&clusters.to_be_bytes());
        io.write(self.storage, HostOffset(0), sector).await?;
        // The image may have been found to be corrupt after the sector was read.
        self.say_corrupt_again();
        Ok(())
    }

    /// Releases the clusters that nothing on disk refers to any more.
    async fn free_unlinked(&self, io: &impl Io, dirty: Dirty) -> Result<(), Errno> {
        let mut gone = dirty.unlinked;
        if let Some(Moved {
            from: (offset, len),
        }) = dirty.moved
        {
            self.state().alloc.metadata.remove_bytes(offset, len);
            gone.push(Unlinked::new(offset, len));
        }
        // A cluster that cannot be released is leaked, not lost.
        if let Err(errno) = self.release(io, &gone).await {
            self.note_leaks();
            let error = std::io::Error::from_raw_os_error(errno);
            let path = self.file.path().display();
            tracing::warn!("{path}: cannot free clusters in the file: {}", cause(error));
        }
        Ok(())
    }

    /// Marks everything as dirty again after a failed write.
    fn restore(&self, dirty: Dirty) {
        let mut state = self.state();
        let state = &mut *state;
        self.set_dirty(state);
        for (slice, _) in dirty.slices {
            if !slice.dirty.swap(true, Ordering::Relaxed) {
                state.dirty_slices.push(slice.clone());
            }
            slice.pins.fetch_sub(1, Ordering::Release);
        }
        state.dirty_l1.extend(dirty.l1);
        state.unlinked.extend(dirty.unlinked);
        if let Some(refcounts) = refcounts(state) {
            let table = dirty.table.is_some();
            let abandoned = refcounts.restore_dirty(dirty.refcounts, table, dirty.moved);
            self.abandon(state, abandoned);
        }
    }
}

fn copied(bytes: &[u8]) -> Buf {
    let mut buf = Buf::new(bytes.len());
    buf.bytes_mut().copy_from_slice(bytes);
    buf
}

/// Awaits operations that were started; returns the first error.
pub(super) async fn all<T>(
    operations: impl IntoIterator<Item = impl Future<Output = Result<T, Errno>>>,
) -> Result<(), Errno> {
    let mut outcome = Ok(());
    for operation in operations {
        let result = operation.await;
        outcome = outcome.and(result.map(|_| ()));
    }
    outcome
}
