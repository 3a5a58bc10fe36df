//! Resizes a disk while it serves requests.
//!
//! A disk that grows first gets room in its L1 table. Then its new part is made to read as zeroes.
//! When all of that is durable, the new size is written to the header.
//!
//! A disk that shrinks first rejects requests beyond its new end. When no such request is in
//! flight, the clusters there are unlinked. When that is durable, the new size is written.
//!
//! All steps use the code of ordinary requests. A power cut at any instant therefore leaves a sound
//! image of either size.

use super::active::Active;
use super::alloc::Run;
use super::disk::Shared;
use super::epoch::{InEpoch, InFlight};
use super::io::{Buf, Errno, Io};
use super::jobs::{Failure, Job};
use super::layout::Layout;
use super::slice::Slice;
use super::tables::{Tables, Unlinked};
use super::worker_io::TaskIo;
use super::zero::Empty;
use crate::qcow2::{L1Entry, L2Entry, Region};
use crate::{GuestOffset, HostOffset};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Maximum time to wait for requests in flight.
const PATIENCE: Duration = Duration::from_secs(30);

/// Header bytes with the offset and size of the refcount table.
const REFCOUNT_TABLE: Range<usize> = 48..60;

/// Number of L2 tables that are unlinked before the change is written.
const TABLES_AT_ONCE: usize = 16;

/// Number of bytes that are zeroed before dirty metadata may be written.
const ZEROED_AT_ONCE: u64 = 64 << 20;

/// Number of clusters that are linked before dirty metadata may be written.
const PLACED_AT_ONCE: u64 = 4096;

impl Active {
    /// Resizes the disk. After an error it has its old size.
    pub(super) async fn resize(
        &self,
        io: &TaskIo,
        shared: &Shared,
        counts: &Arc<InFlight>,
        job: &Job,
    ) -> Result<(), Failure> {
        let tables = self.top().ok_or(libc::EIO)?;
        let (old, new) = (tables.size(), job.size);
        if new < old {
            shared.set_size(new);
            let shrunk = self.shrink(io, tables, new).await;
            match shrunk {
                Ok(()) => tables.set_size(new),
                Err(_) => shared.set_size(old),
            }
            return shrunk;
        }
        if let Layout::Qcow2(g) = &tables.layout {
            tables.grow_l1(io, g.l1_entries_for(new)).await?;
            // Beyond the old size, the tables may have saved VM state, or clusters left by a failed
            // resize.
            tables.cut(io, g.clusters_of(old)).await?;
        }
        tables.set_size(new);
        let grown = self.grow(io, tables, counts, job, old).await;
        match grown {
            Ok(()) => shared.set_size(new),
            Err(_) => {
                tables.set_size(old);
                // Otherwise the journal would show a successor entries beyond the disk's end.
                let _ = tables.write_back_now(io).await;
            }
        }
        Ok(grown?)
    }

    async fn shrink(&self, io: &TaskIo, tables: &Tables, size: u64) -> Result<(), Failure> {
        self.outlive(io).await?;
        let clusters = GuestOffset(size).up_to(tables.layout.cluster_size());
        let clusters = clusters.cluster(tables.layout.cluster_bits());
        // A table that is unreadable or corrupt must not be found after others were unlinked.
        tables.check_from(io, clusters).await?;
        tables.cut(io, clusters).await.map_err(Failure::PartlyCut)?;
        let written = tables.write_size(io, size).await;
        written.map_err(Failure::PartlyCut)
    }

    async fn grow(
        &self,
        io: &TaskIo,
        tables: &Tables,
        counts: &Arc<InFlight>,
        job: &Job,
        old: u64,
    ) -> Result<(), Errno> {
        // Requests in flight may take the old end of the disk for the end of its last cluster.
        self.outlive(io).await?;
        {
            let parity = self.epochs.enter(counts);
            let _counted = InEpoch::adopt(self.epochs.clone(), counts.clone(), parity);
            match job.raw_data_file {
                true => tables.place_all(io, old, job.size).await?,
                false => self.hide(io, tables, old, job.size).await?,
            }
        }
        tables.write_size(io, job.size).await
    }

    /// Waits until all requests have ended that had started before.
    async fn outlive(&self, io: &TaskIo) -> Result<(), Errno> {
        let epoch = self.epochs.now();
        let start = Instant::now();
        while !self.epochs.is_over(epoch) {
            if start.elapsed() > PATIENCE {
                return Err(libc::ETIMEDOUT);
            }
            io.pause().await;
        }
        Ok(())
    }

    /// Makes the new part of the disk read as zeroes.
    ///
    /// This concerns the rest of the disk's last cluster, which may have any contents, and the
    /// range in which a larger backing image has data.
    async fn hide(&self, io: &TaskIo, tables: &Tables, old: u64, new: u64) -> Result<(), Errno> {
        let size = tables.layout.cluster_size();
        let below = self.layers.get(1).map_or(0, |layer| layer.size());
        let end = GuestOffset(old.max(below.min(new))).up_to(size);
        let (mut at, end) = (GuestOffset(old), end.min(GuestOffset(new)));
        while at < end {
            let next = end.min((at + ZEROED_AT_ONCE).down_to(size));
            let how = Empty::Zero { unmap: true };
            self.empty(io, tables, how, at..next).await?;
            tables.limit_dirty(io).await?;
            at = next;
        }
        Ok(())
    }
}

impl Tables {
    /// Links each new cluster to its place in a raw data file.
    async fn place_all(&self, io: &TaskIo, old: u64, new: u64) -> Result<(), Errno> {
        let (bits, size) = (self.layout.cluster_bits(), self.layout.cluster_size());
        let all = self.layout.all_units();
        for cluster in old.div_ceil(size)..new.div_ceil(size) {
            let guest = GuestOffset::of_cluster(cluster, bits);
            let _room = self.make_room(io, 1).await?;
            let _allocating = self.allocating.lock(cluster..cluster + 1).await;
            let slice = self.slice_to_change(io, guest).await?;
            let entry = self.layout.entry(Some(guest.in_data_file()), all, 0);
            self.link(&mut self.state(), &slice, self.index_of(guest), entry);
            drop(slice);
            if cluster % PLACED_AT_ONCE == 0 {
                self.limit_dirty(io).await?;
            }
        }
        Ok(())
    }

    /// Makes the L1 table at least this long, also on disk.
    async fn grow_l1(&self, io: &impl Io, entries: u64) -> Result<(), Errno> {
        let entries = usize::try_from(entries).map_err(|_| libc::EFBIG)?;
        if entries <= self.l1.len() {
            return Ok(());
        }
        let bytes = entries as u64 * L1Entry::SIZE;
        let clusters = bytes.div_ceil(self.layout.cluster_size());
        let run = self.allocate(io, clusters, true).await?;
        let moved = self.move_l1(io, &run, entries).await;
        // Unless the header on disk may refer to the new table.
        if moved.is_err() && self.state().header.is_none() {
            self.give_back(&run);
        }
        moved
    }

    /// Moves the L1 table; its old clusters are free once nothing on disk refers to them.
    async fn move_l1(&self, io: &impl Io, run: &Run, entries: usize) -> Result<(), Errno> {
        let bits = self.layout.cluster_bits();
        let (old, len) = (self.l1.offset(), self.l1.len() as u64 * L1Entry::SIZE);
        let new = run.start(bits);
        let _alone = self.writing_back.lock_all().await;
        // Writes the refcounts of the new clusters. L1 entries changed from now on are written
        // later, to the table's place of that time.
        self.write_back(io).await?;
        let mut table = Buf::new((run.len() << bits) as usize);
        if len > 0 {
            let before = io.read(self.storage, old, len.next_multiple_of(512) as usize);
            let len = len as usize;
            table.bytes_mut()[..len].copy_from_slice(&before.await?.bytes()[..len]);
        }
        io.write(self.storage, new, table).await?;
        self.barrier(io).await?;
        let count = (entries as u32).to_be_bytes();
        let place = new.0.to_be_bytes();
        self.change_header(io, &[(36, &count), (40, &place)])
            .await?;
        self.l1.moved(new, entries);
        let mut state = self.state();
        state.alloc.metadata.remove_bytes(old, len);
        let clusters = run.clusters.clone();
        state.alloc.metadata.add(Region::ActiveL1, clusters);
        if len > 0 {
            state.unlinked.push(Unlinked::new(old, len));
        }
        self.set_dirty(&mut state);
        Ok(())
    }

    /// Writes the disk's size to the header, after everything else is durable.
    async fn write_size(&self, io: &impl Io, size: u64) -> Result<(), Errno> {
        let _alone = self.writing_back.lock_all().await;
        if let Some(journal) = &self.state().journal {
            journal.announce_size(size);
        }
        self.write_back(io).await?;
        let changed = match self.layout {
            Layout::Qcow2(_) => (24, size.to_be_bytes()),
            Layout::Qed(_) => (48, size.to_le_bytes()),
        };
        self.change_header(io, &[(changed.0, &changed.1)]).await?;
        if let Some(journal) = &self.state().journal {
            journal.set_size(size);
        }
        Ok(())
    }

    /// Changes bytes of the header's first sector, which is written wholly or not at all.
    ///
    /// The caller holds the lock for writing back.
    async fn change_header(&self, io: &impl Io, changes: &[(usize, &[u8])]) -> Result<(), Errno> {
        let sector = io.read(self.storage, HostOffset(0), 512).await?;
        let mut changed = Buf::new(512);
        changed.bytes_mut().copy_from_slice(sector.bytes());
        for (at, bytes) in changes {
            changed.bytes_mut()[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        self.replace_header(io, sector, changed).await
    }

    /// Replaces the header's first sector, after everything written before is durable.
    ///
    /// If it is unknown which of the two sectors is on disk, the next write-back first restores the
    /// old one.
    pub(super) async fn switch_header(&self, io: &impl Io, sector: &[u8]) -> Result<(), Errno> {
        let _alone = self.writing_back.lock_all().await;
        self.write_back(io).await?;
        self.barrier(io).await?;
        let old = io.read(self.storage, HostOffset(0), sector.len()).await?;
        let mut new = Buf::new(sector.len());
        new.bytes_mut().copy_from_slice(sector);
        // The write-back may have moved the refcount table.
        new.bytes_mut()[REFCOUNT_TABLE].copy_from_slice(&old.bytes()[REFCOUNT_TABLE]);
        self.replace_header(io, old, new).await
    }

    async fn replace_header(&self, io: &impl Io, old: Buf, new: Buf) -> Result<(), Errno> {
        let written = self.write_header(io, new).await;
        if written.is_err() {
            // The file may have either header.
            {
                let mut state = self.state();
                state.header = Some(old.bytes().to_vec());
                self.set_dirty(&mut state);
            }
            // If this fails, the next write-back does it.
            let _ = self.settle_header(io).await;
        }
        written
    }

    /// Restores the header from before a failed change, if there is one.
    pub(super) async fn settle_header(&self, io: &impl Io) -> Result<(), Errno> {
        let Some(sector) = self.state().header.clone() else {
            return Ok(());
        };
        let mut buf = Buf::new(sector.len());
        buf.bytes_mut().copy_from_slice(&sector);
        self.write_header(io, buf).await?;
        self.state().header = None;
        Ok(())
    }

    async fn write_header(&self, io: &impl Io, sector: Buf) -> Result<(), Errno> {
        io.write(self.storage, HostOffset(0), sector).await?;
        // The image may have been found to be corrupt after the sector was read.
        self.say_corrupt_again();
        self.barrier(io).await
    }

    /// Durably unlinks all guest clusters from this one on. No request uses them.
    async fn cut(&self, io: &impl Io, from: u64) -> Result<(), Errno> {
        let per_table = self.layout.slice_entries() * self.layout.slices_per_table();
        let whole = from.next_multiple_of(per_table);
        self.cut_clusters(io, from..whole).await?;
        let mut next = (whole / per_table) as usize;
        loop {
            let _alone = self.writing_back.lock_all().await;
            // Dirty slices need their tables when they are written, and so do the journal's records
            // when a successor restores them.
            self.write_back(io).await?;
            let mut cut = 0;
            while next < self.l1.len() && cut < TABLES_AT_ONCE {
                cut += usize::from(self.cut_table(io, next).await?);
                next += 1;
            }
            if cut == 0 {
                return Ok(());
            }
        }
    }

    /// Checks that `cut` can unlink all guest clusters from this one on. Changes nothing.
    async fn check_from(&self, io: &impl Io, from: u64) -> Result<(), Errno> {
        let entries = self.layout.slice_entries();
        let whole = from.next_multiple_of(entries * self.layout.slices_per_table());
        let mut at = from;
        while at < whole {
            let end = (at / entries + 1) * entries;
            let number = at / entries;
            if self.l1_index(number) < self.l1.len()
                && let Some(slice) = self.slice(io, number).await?
            {
                self.references(&slice.0, at..end)?;
            }
            at = end;
        }
        // (`references_of_table` may read slices of new tables from the file.)
        self.write_back_now(io).await?;
        let first = self.l1_index(whole / entries);
        for index in first..self.l1.len() {
            self.references_of_table(io, index).await?;
        }
        Ok(())
    }

    /// Unlinks clusters of one table. (The journal does not record this.)
    async fn cut_clusters(&self, io: &impl Io, clusters: Range<u64>) -> Result<(), Errno> {
        let (bits, entries) = (self.layout.cluster_bits(), self.layout.slice_entries());
        let mut at = clusters.start;
        while at < clusters.end {
            let end = clusters.end.min((at / entries + 1) * entries);
            let guest = GuestOffset::of_cluster(at, bits);
            if self.l1_index(self.slice_of(guest)) >= self.l1.len() {
                return Ok(());
            }
            let Some(slice) = self.slice(io, self.slice_of(guest)).await? else {
                return Ok(());
            };
            if self.has_entries(&slice.0, at..end) {
                drop(slice);
                let slice = self.slice_to_change(io, guest).await?;
                let gone = self.references(&slice.0, at..end)?;
                let mut state = self.state();
                gone.into_iter()
                    .for_each(|gone| state.unlink(Some(gone), self.layout.cluster_bits()));
                for cluster in at..end {
                    let index = self.index_of(GuestOffset::of_cluster(cluster, bits));
                    self.set_entry(&mut state, &slice, index, L2Entry::default());
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Unlinks the whole table of an L1 entry; false if the entry has no table.
    ///
    /// The caller holds the lock for writing back, and nothing of the table is dirty.
    async fn cut_table(&self, io: &impl Io, index: usize) -> Result<bool, Errno> {
        let Some(gone) = self.references_of_table(io, index).await? else {
            return Ok(false);
        };
        let slices = self.slices_of_table(index);
        let mut state = self.state();
        self.set_dirty(&mut state);
        gone.into_iter()
            .for_each(|gone| state.unlink(Some(gone), self.layout.cluster_bits()));
        state.cache.forget(slices);
        self.l1.entry(index).store(0, Ordering::Release);
        state.dirty_l1.insert(index);
        Ok(true)
    }

    /// Returns the table of an L1 entry and everything that its entries refer to in the image's
    /// file; `None` if the L1 entry has no table.
    async fn references_of_table(
        &self,
        io: &impl Io,
        index: usize,
    ) -> Result<Option<Vec<Unlinked>>, Errno> {
        let entry = self.l1.entry(index).load(Ordering::Acquire);
        let table = self.checked(self.layout.table(entry, self.known_len()))?;
        let Some(table) = table else {
            return Ok(None);
        };
        let mut found = vec![Unlinked {
            offset: table,
            len: self.layout.table_bytes(),
            is_table: true,
        }];
        for number in self.slices_of_table(index) {
            let cached = self.state().cache.get(number);
            let slice = match cached {
                Some(slice) => slice,
                None => {
                    let at = self.place_of(number, table);
                    let len = self.layout.slice_bytes() as usize;
                    let bytes = io.read(self.storage, at, len).await?;
                    Arc::new(Slice::parse(number, bytes.bytes(), &self.layout))
                }
            };
            let first = number * self.layout.slice_entries();
            found.extend(self.references(&slice, first..first + self.layout.slice_entries())?);
        }
        Ok(Some(found))
    }

    fn slices_of_table(&self, index: usize) -> Range<u64> {
        let count = self.layout.slices_per_table();
        index as u64 * count..(index as u64 + 1) * count
    }

    /// Returns what the entries of these clusters, all of the slice, refer to in the image's file.
    fn references(&self, slice: &Slice, clusters: Range<u64>) -> Result<Vec<Unlinked>, Errno> {
        let bits = self.layout.cluster_bits();
        let file_len = self.known_len();
        let mut found = Vec::new();
        for cluster in clusters {
            let guest = GuestOffset::of_cluster(cluster, bits);
            let entry = slice.entry(self.index_of(guest));
            let decoded = self.checked_entry(self.layout.decode(entry, guest, file_len))?;
            found.extend(self.referred(&decoded));
        }
        Ok(found)
    }

    fn has_entries(&self, slice: &Slice, mut clusters: Range<u64>) -> bool {
        let bits = self.layout.cluster_bits();
        let index = |cluster| self.index_of(GuestOffset::of_cluster(cluster, bits));
        clusters.any(|cluster| slice.entry(index(cluster)) != L2Entry::default())
    }
}
