//! Free space of qcow2 images: clusters of refcount 0.
//!
//! A refcount that is too high leaks a cluster; one that is too low loses data. Therefore a
//! refcount rises in memory when its cluster is taken, and reaches the disk before anything that
//! refers to the cluster. The refcount is lowered only when nothing on disk refers to the cluster
//! any more.

use super::{Run, Runs};
use crate::HostOffset;
use crate::qcow2::refcount::{LongerTable, TableEntry, get, set};
use crate::qcow2::{Geometry, MAX_HOST_OFFSET, MAX_REFCOUNT_TABLE_BYTES, Region};
use crate::served::epoch::Epochs;
use crate::served::io::{Buf, Errno, Io};
use crate::served::layout::Problem;
use crate::served::tables::{State, Tables, Unlinked};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum bytes of clean refcount blocks that are kept in memory.
const KEPT: u64 = 8 << 20;

/// Number of returned runs that are searched for one whose refcounts are in memory.
const RETURNED_TRIED: usize = 8;

/// A refcount block in memory.
pub(super) struct Block {
    bytes: Vec<u8>,
    /// Range of bytes that differ from the disk.
    dirty: Range<usize>,
}

/// A refcount table that was moved to grow, so that the header must be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::served) struct Moved {
    /// Old offset and length in bytes.
    pub(in crate::served) from: (HostOffset, u64),
}

pub(in crate::served) struct Refcounts {
    pub(super) g: Geometry,
    /// Offsets of the refcount blocks, 0 for none.
    table: Vec<u64>,
    table_offset: HostOffset,
    dirty_table: bool,
    moved: Option<Moved>,
    pub(super) blocks: BTreeMap<u64, Block>,
    /// Number of the block to search next.
    next: u64,
    /// Free clusters of the blocks searched so far, in order.
    pub(super) free: VecDeque<Range<u64>>,
    /// Free clusters that were in use before.
    pub(super) returned: Runs,
    /// The first free byte of a cluster of compressed data that has room left.
    pub(super) open: Option<HostOffset>,
    /// Freed clusters that requests in flight may still use, each with the epoch of its release.
    freed: VecDeque<(u64, Range<u64>)>,
    /// Free clusters that wait for their discard and cannot be taken yet.
    to_discard: VecDeque<Range<u64>>,
    discarding: Runs,
    epochs: Arc<Epochs>,
    /// First cluster that has never been written.
    fresh_from: u64,
}

/// Dirty refcounts, and the offsets that they belong to.
pub(in crate::served) struct DirtyRefcounts {
    pub(in crate::served) blocks: Vec<(HostOffset, Vec<u8>)>,
    /// Offset and contents of the whole refcount table.
    pub(in crate::served) table: Option<(HostOffset, Vec<u8>)>,
    pub(in crate::served) moved: Option<Moved>,
}

/// The clusters that were used for new refcount blocks.
struct Made {
    blocks: Range<u64>,
    /// Clusters of the moved table; empty unless the table was moved.
    table: Range<u64>,
    /// Offset and bytes of a table that was moved again before it was used.
    abandoned: Option<(HostOffset, u64)>,
}

impl Refcounts {
    /// Creates the free space from the table as the file has it, and checks the table's entries.
    ///
    /// Clusters from `fresh_from` on have never been written.
    pub(in crate::served) fn new(
        g: Geometry,
        table: Vec<u64>,
        table_offset: HostOffset,
        fresh_from: u64,
        epochs: Arc<Epochs>,
    ) -> Result<Refcounts, Problem> {
        for entry in &table {
            let block = TableEntry(*entry).block(&g);
            block.map_err(|error| format!("refcount table: {error}"))?;
        }
        Ok(Refcounts {
            g,
            table,
            table_offset,
            dirty_table: false,
            moved: None,
            blocks: BTreeMap::new(),
            next: 0,
            free: VecDeque::new(),
            returned: Runs::default(),
            open: None,
            freed: VecDeque::new(),
            to_discard: VecDeque::new(),
            discarding: Runs::default(),
            epochs,
            fresh_from,
        })
    }

    pub(super) fn block_of(&self, cluster: u64) -> u64 {
        cluster >> self.g.refcount_block_bits()
    }

    fn index_of(&self, cluster: u64) -> usize {
        (cluster & (self.g.refcount_block_entries() - 1)) as usize
    }

    /// Returns a refcount. The cluster's block is in memory.
    pub(super) fn get(&self, cluster: u64) -> u64 {
        let block = &self.blocks[&self.block_of(cluster)];
        get(&block.bytes, self.g.refcount_order, self.index_of(cluster))
    }

    /// Sets a refcount. The cluster's block is in memory.
    pub(super) fn set(&mut self, cluster: u64, count: u64) {
        let (number, index) = (self.block_of(cluster), self.index_of(cluster));
        let order = self.g.refcount_order;
        let block = self.blocks.get_mut(&number).expect("it is in memory");
        set(&mut block.bytes, order, index, count);
        // Whole sectors are marked, since only these can be written.
        let at = ((index << order) / 8) & !511;
        block.dirty = match block.dirty.is_empty() {
            true => at..at + 512,
            false => block.dirty.start.min(at)..block.dirty.end.max(at + 512),
        };
    }

    pub(super) fn take(&mut self, n: u64, exact: bool) -> Option<Run> {
        if (n == 1 || !exact)
            && let Some(run) = self.first_returned()
        {
            let clusters = run.start..run.end.min(run.start + n);
            self.returned.remove(&clusters);
            clusters.clone().for_each(|cluster| self.set(cluster, 1));
            return Some(Run {
                clusters,
                fresh: false,
            });
        }
        let least = if exact { n } else { 1 };
        let at = self.free.iter().position(|r| r.end - r.start >= least)?;
        let range = &mut self.free[at];
        let mut clusters = range.start..range.end.min(range.start + n);
        if !exact && clusters.contains(&self.fresh_from) && clusters.start < self.fresh_from {
            clusters.end = self.fresh_from;
        }
        range.start = clusters.end;
        if range.start == range.end {
            self.free.remove(at);
        }
        clusters.clone().for_each(|cluster| self.set(cluster, 1));
        Some(Run {
            fresh: clusters.start >= self.fresh_from,
            clusters,
        })
    }

    /// Returns the first returned clusters in one block whose refcounts are in memory.
    fn first_returned(&self) -> Option<Range<u64>> {
        let in_memory = |run: &Range<u64>| self.blocks.contains_key(&self.block_of(run.start));
        let run = self.returned.iter().take(RETURNED_TRIED).find(in_memory)?;
        let block_end = (self.block_of(run.start) + 1) * self.g.refcount_block_entries();
        Some(run.start..run.end.min(block_end))
    }

    /// Returns the block of a free cluster that cannot be taken until that block is read.
    fn block_of_returned(&mut self) -> Option<u64> {
        let number = self.block_of(self.returned.iter().next()?.start);
        (!self.blocks.contains_key(&number)).then_some(number)
    }

    pub(super) fn give_back(&mut self, run: &Run) {
        for cluster in run.clusters.clone() {
            // If its block has left memory meanwhile, the cluster is leaked.
            if self.blocks.contains_key(&self.block_of(cluster)) {
                self.set(cluster, 0);
                self.returned.insert(cluster..cluster + 1);
            }
        }
    }

    /// Makes freed clusters available that no request in flight can use any more.
    ///
    /// The clusters can be taken at once, or after their discard. Returns how many can be taken at
    /// once.
    pub(super) fn reuse(&mut self, discard: bool) -> u64 {
        if self.freed.is_empty() {
            return 0;
        }
        // Each call ends an epoch if nothing older is in flight.
        let reusable = (0..3).filter_map(|_| self.epochs.reusable()).max();
        let unused = |(epoch, _): &(u64, Range<u64>)| reusable.is_some_and(|r| *epoch <= r);
        let count = self.freed.iter().take_while(|freed| unused(freed)).count();
        // (Runs that were freed one after the other may be adjacent.)
        let mut reused = Runs::default();
        for (_, run) in self.freed.drain(..count) {
            reused.insert(run);
        }
        let mut clusters = 0;
        for run in reused {
            if discard {
                self.discarding.insert(run.clone());
                self.to_discard.push_back(run);
            } else {
                clusters += run.end - run.start;
                self.returned.insert(run);
            }
        }
        clusters
    }

    /// Returns whether freed clusters wait for requests in flight, or for their discard.
    pub(in crate::served) fn has_freed(&self) -> bool {
        !self.freed.is_empty() || !self.discarding.is_empty()
    }

    pub(super) fn has_to_discard(&self) -> bool {
        !self.to_discard.is_empty()
    }

    /// Takes at most `most` of the runs that wait for their discard.
    pub(super) fn next_to_discard(&mut self, most: usize) -> Vec<Range<u64>> {
        let most = most.min(self.to_discard.len());
        self.to_discard.drain(..most).collect()
    }

    /// Makes clusters available that were discarded.
    pub(super) fn discarded(&mut self, run: Range<u64>) {
        self.discarding.remove(&run);
        self.returned.insert(run);
    }

    /// Lowers a refcount by one; true if it is now 0. The cluster's block is in memory.
    pub(super) fn lower(&mut self, cluster: u64) -> Result<bool, Problem> {
        let count = self.get(cluster);
        if count == 0 {
            return Err(format!("cluster {cluster} was in use at refcount 0"));
        }
        self.set(cluster, count - 1);
        if count == 1
            && self
                .open
                .is_some_and(|at| at.cluster(self.g.cluster_bits) == cluster)
        {
            // The next task that takes the cluster takes all of it.
            self.open = None;
        }
        Ok(count == 1)
    }

    /// Notes clusters of refcount 0. The clusters can be reused once no request in flight uses
    /// them.
    pub(super) fn freed(&mut self, clusters: Runs) {
        let now = self.epochs.now();
        self.freed
            .extend(clusters.into_iter().map(|run| (now, run)));
    }

    /// Copies all that differs from the disk; it counts as clean from now on.
    pub(in crate::served) fn take_dirty(&mut self) -> DirtyRefcounts {
        let mut blocks = Vec::new();
        for (number, block) in &mut self.blocks {
            if !block.dirty.is_empty() {
                let dirty = std::mem::take(&mut block.dirty);
                let at = HostOffset(self.table[*number as usize]) + dirty.start as u64;
                blocks.push((at, block.bytes[dirty].to_vec()));
            }
        }
        let table = std::mem::take(&mut self.dirty_table).then(|| {
            let bytes = self.table.iter().flat_map(|entry| entry.to_be_bytes());
            (self.table_offset, bytes.collect())
        });
        DirtyRefcounts {
            blocks,
            table,
            moved: self.moved.take(),
        }
    }

    /// Marks everything as dirty again after a failed write.
    ///
    /// Returns the offset and bytes of a table that was moved again meanwhile.
    pub(in crate::served) fn restore_dirty(
        &mut self,
        blocks: Vec<(HostOffset, Vec<u8>)>,
        table: bool,
        moved: Option<Moved>,
    ) -> Option<(HostOffset, u64)> {
        for (at, bytes) in blocks {
            let base = at.down_to(self.g.cluster_size());
            let (start, end) = ((at - base) as usize, (at - base) as usize + bytes.len());
            let number = self.table.iter().position(|block| *block == base.0);
            let number = number.expect("blocks never move") as u64;
            // Blocks leave memory only between write-backs.
            let block = self.blocks.get_mut(&number).expect("it is in memory");
            block.dirty = match block.dirty.is_empty() {
                true => start..end,
                false => block.dirty.start.min(start)..block.dirty.end.max(end),
            };
        }
        self.dirty_table |= table;
        let moved = moved?;
        self.moved.replace(moved).map(|again| again.from)
    }

    /// Removes clean blocks from memory, except those with known free clusters.
    ///
    /// The caller holds the search lock, and nothing is being written.
    pub(super) fn shrink(&mut self) {
        let max = (KEPT >> self.g.cluster_bits).max(4) as usize;
        if self.blocks.len() <= max {
            return;
        }
        let bits = self.g.refcount_block_bits();
        let searched: Vec<u64> = self.free.iter().map(|r| r.start >> bits).collect();
        self.blocks
            .retain(|number, block| searched.contains(number) || !block.dirty.is_empty());
    }

    /// Returns the offset of a block that must be read first; `None` if it is in memory or missing.
    fn missing(&self, number: u64) -> Option<HostOffset> {
        let at = self.table.get(number as usize).copied().unwrap_or(0);
        (at != 0 && !self.blocks.contains_key(&number)).then_some(HostOffset(at))
    }

    /// Returns the first block that the table has no room for, if it has none for this one.
    fn without_room(&self, number: u64) -> Option<u64> {
        let len = self.table.len() as u64;
        (number >= len).then_some(len)
    }

    fn insert(&mut self, number: u64, bytes: Vec<u8>) {
        let block = Block { bytes, dirty: 0..0 };
        self.blocks.insert(number, block);
    }

    /// Notes the free clusters of a block that is in memory.
    fn scan(&mut self, number: u64) {
        let entries = self.g.refcount_block_entries();
        let first = number * entries;
        let last = MAX_HOST_OFFSET
            .cluster(self.g.cluster_bits)
            .min(first + entries);
        let mut known = vec![false; entries as usize];
        let freed = self.freed.iter().map(|(_, run)| {
            let start = run.start.clamp(first, last);
            start..run.end.clamp(start, last)
        });
        let returned = self.returned.overlapping(first..last);
        let discarding = self.discarding.overlapping(first..last);
        for run in returned.chain(discarding).chain(freed) {
            known[(run.start - first) as usize..(run.end - first) as usize].fill(true);
        }
        let mut run: Option<Range<u64>> = None;
        for cluster in first..last {
            let is_free = self.get(cluster) == 0 && !known[(cluster - first) as usize];
            match (&mut run, is_free) {
                (Some(run), true) => run.end += 1,
                (None, true) => run = Some(cluster..cluster + 1),
                (_, false) => self.free.extend(run.take()),
            }
        }
        self.free.extend(run);
    }

    /// Creates the missing block `number`, and a longer table if the table has no entry for it.
    ///
    /// Both go to the start of the clusters that the block counts, which are free.
    fn make_block(&mut self, number: u64) -> Result<Made, Errno> {
        let entries = self.g.refcount_block_entries();
        let per_cluster = self.g.cluster_size() / TableEntry::SIZE;
        let start = number * entries;
        let mut table_clusters = 0;
        let mut blocks = 1;
        let mut abandoned = None;
        if number >= self.table.len() as u64 {
            let longer = LongerTable::new(&self.g, number, self.table.len() as u64);
            (blocks, table_clusters) = (longer.blocks, longer.clusters);
        }
        let len = table_clusters * per_cluster;
        let table_start = start + blocks;
        let end = table_start + table_clusters;
        if len * TableEntry::SIZE > MAX_REFCOUNT_TABLE_BYTES
            || HostOffset::of_cluster(end, self.g.cluster_bits) > MAX_HOST_OFFSET
        {
            return Err(libc::EFBIG);
        }
        if table_clusters > 0 {
            let bytes = self.table.len() as u64 * TableEntry::SIZE;
            let from = (self.table_offset, bytes);
            match self.moved {
                None => self.moved = Some(Moved { from }),
                Some(_) => abandoned = Some(from),
            }
            self.table.resize(len as usize, 0);
            self.table_offset = HostOffset::of_cluster(table_start, self.g.cluster_bits);
        }
        for block in 0..blocks {
            self.table[(number + block) as usize] = (start + block) << self.g.cluster_bits;
            self.insert(number + block, vec![0; self.g.cluster_size() as usize]);
            let whole = self.g.cluster_size() as usize;
            let made = self.blocks.get_mut(&(number + block));
            made.expect("just made").dirty = 0..whole;
        }
        (start..end).for_each(|cluster| self.set(cluster, 1));
        self.dirty_table = true;
        Ok(Made {
            blocks: start..table_start,
            table: table_start..end,
            abandoned,
        })
    }
}

impl Tables {
    /// Finds free clusters in the next block that has any.
    pub(super) async fn search_refcounts(&self, io: &impl Io, n: u64) -> Result<(), Errno> {
        if n == 1
            && let Some(number) = self.refcounts(Refcounts::block_of_returned)?
        {
            return self.load_refcounts(io, number).await;
        }
        loop {
            let number = self.refcounts(|r| r.next)?;
            self.load_refcounts(io, number).await?;
            if !self.refcounts(|r| r.blocks.contains_key(&number))? {
                // An extension of the file writes zeroes at its new end, and must not overwrite
                // the new block: neither one in flight, nor a later one.
                let _extending = self.extending.lock_all().await;
                self.reserve_refcounts(io, number).await?;
                self.make_refcounts(&mut self.state(), number)?;
            }
            let mut state = self.state();
            let state = &mut *state;
            let space = super::refcounts(state).ok_or(libc::EROFS)?;
            space.scan(number);
            space.next = number + 1;
            if !space.free.is_empty() {
                return Ok(());
            }
        }
    }

    /// Allocates the file system's space for a new block while the request can still fail.
    ///
    /// A flush that found no space would fail, and so would every way to make room.
    async fn reserve_refcounts(&self, io: &impl Io, number: u64) -> Result<(), Errno> {
        let cluster = self.refcounts(|r| number * r.g.refcount_block_entries())?;
        let hit = self.state().alloc.metadata.in_cluster(cluster);
        self.checked(match hit {
            Some(region) => Err(format!("cluster {cluster} has no refcount but is {region}")),
            None => Ok(()),
        })?;
        let at = HostOffset::of_cluster(cluster, self.layout.cluster_bits());
        let zeroes = Buf::new(self.layout.cluster_size() as usize);
        io.write(self.storage, at, zeroes).await
    }

    fn make_refcounts(&self, state: &mut State, number: u64) -> Result<(), Errno> {
        let space = super::refcounts(state).ok_or(libc::EROFS)?;
        let made = space.make_block(number)?;
        self.abandon(state, made.abandoned);
        let end = made.table.end << self.layout.cluster_bits();
        self.used.fetch_max(end, Ordering::Relaxed);
        if self.file.bytes().grows() {
            self.file_len.fetch_max(end, Ordering::Release);
        }
        let metadata = &mut state.alloc.metadata;
        for cluster in made.blocks.start..made.table.end {
            let hit = match metadata.in_cluster(cluster) {
                Some(region) => Err(format!("cluster {cluster} has no refcount but is {region}")),
                None => Ok(()),
            };
            self.checked(hit)?;
        }
        for cluster in made.blocks {
            metadata.add(Region::RefcountBlock, cluster..cluster + 1);
        }
        if !made.table.is_empty() {
            metadata.add(Region::RefcountTable, made.table);
        }
        self.set_dirty(state);
        Ok(())
    }

    /// Claims a cluster that a predecessor's journal refers to, and returns its refcount.
    ///
    /// Callers go from lower clusters to higher ones.
    pub(in crate::served) async fn claim_refcount(
        &self,
        io: &impl Io,
        cluster: u64,
    ) -> Result<u64, Errno> {
        let _searching = self.searching.lock_all().await;
        let number = self.refcounts(|r| r.block_of(cluster))?;
        self.load_refcounts(io, number).await?;
        // The predecessor has made one block after the other, and a longer table for the first
        // block without an entry. The part of the file that this block counts may hold nothing
        // known, but the table exists.
        while let Some(first) = self.refcounts(|r| r.without_room(number))? {
            self.make_refcounts(&mut self.state(), first)?;
        }
        if !self.refcounts(|r| r.blocks.contains_key(&number))? {
            self.make_refcounts(&mut self.state(), number)?;
        }
        self.refcounts(|r| {
            if r.get(cluster) == 0 {
                r.set(cluster, 1);
            }
            r.get(cluster)
        })
    }

    /// Releases a refcount table that was moved again before it was used.
    pub(in crate::served) fn abandon(&self, state: &mut State, table: Option<(HostOffset, u64)>) {
        if let Some((offset, len)) = table {
            state.unlinked.push(Unlinked::new(offset, len));
            state.alloc.metadata.remove_bytes(offset, len);
        }
    }

    fn refcounts<T>(&self, f: impl FnOnce(&mut Refcounts) -> T) -> Result<T, Errno> {
        super::refcounts(&mut self.state())
            .map(f)
            .ok_or(libc::EROFS)
    }

    /// Loads the refcounts of the cluster, if the image has any. The caller holds the search lock.
    pub(super) async fn load_refcounts_of(&self, io: &impl Io, cluster: u64) -> Result<(), Errno> {
        match self.refcounts(|r| r.block_of(cluster)) {
            Ok(number) => {
                self.load_refcounts(io, number).await?;
                let there = self.refcounts(|r| r.blocks.contains_key(&number))?;
                self.checked(match there {
                    true => Ok(()),
                    false => Err(format!("cluster {cluster} is in use without a refcount")),
                })
            }
            Err(_) => Ok(()),
        }
    }

    async fn load_refcounts(&self, io: &impl Io, number: u64) -> Result<(), Errno> {
        let Some(at) = self.refcounts(|r| r.missing(number))? else {
            return Ok(());
        };
        let len = self.layout.cluster_size() as usize;
        let buf = io.read(self.storage, at, len).await?;
        self.refcounts(|r| r.insert(number, buf.bytes().to_vec()))
    }
}

#[cfg(test)]
mod tests;
