//! qcow2's free space: clusters of refcount 0.
//!
//! Refcounts that are too high leak a cluster; any that is too low loses
//! data. So they go up in memory when a cluster is taken, reach the disk
//! before whatever refers to it, and go down only once nothing on disk does.

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

/// Bytes of clean refcount blocks that are kept.
const KEPT: u64 = 8 << 20;

/// Returned runs that are looked at for one whose refcounts are in memory.
const RETURNED_TRIED: usize = 8;

/// A refcount block in memory.
pub(super) struct Block {
    bytes: Vec<u8>,
    /// Bytes that are not as on disk.
    dirty: Range<usize>,
}

/// A refcount table that was moved to grow: the header has to follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::served) struct Moved {
    /// Where it was: offset and bytes.
    pub(in crate::served) from: (HostOffset, u64),
}

pub(in crate::served) struct Refcounts {
    pub(super) g: Geometry,
    /// Offsets of blocks, 0 for none.
    table: Vec<u64>,
    table_offset: HostOffset,
    dirty_table: bool,
    moved: Option<Moved>,
    pub(super) blocks: BTreeMap<u64, Block>,
    /// The block in which to search next.
    next: u64,
    /// Free clusters of the block before that one, in order.
    pub(super) free: VecDeque<Range<u64>>,
    /// Free clusters that have been used.
    pub(super) returned: Runs,
    /// The first free byte of a cluster of compressed ones that is in use.
    pub(super) open: Option<HostOffset>,
    /// Free clusters that requests in flight may use, and since when.
    freed: VecDeque<(u64, Range<u64>)>,
    /// Free clusters that wait for their discard, and those whose discard is in flight: nobody takes them yet.
    to_discard: VecDeque<Range<u64>>,
    discarding: Runs,
    epochs: Arc<Epochs>,
    /// Clusters from here on have never been written.
    fresh_from: u64,
}

/// What has to be written, and where.
pub(in crate::served) struct DirtyRefcounts {
    pub(in crate::served) blocks: Vec<(HostOffset, Vec<u8>)>,
    /// The whole table.
    pub(in crate::served) table: Option<(HostOffset, Vec<u8>)>,
    pub(in crate::served) moved: Option<Moved>,
}

/// What became of free clusters when a block was made.
struct Made {
    blocks: Range<u64>,
    /// Empty unless the table was moved.
    table: Range<u64>,
    /// Offset and bytes of a table that was moved again before it was used.
    abandoned: Option<(HostOffset, u64)>,
}

impl Refcounts {
    /// `table` as the file has it; its entries are checked here. Clusters
    /// from `fresh_from` on have never been written.
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

    /// The cluster's block is in memory.
    pub(super) fn get(&self, cluster: u64) -> u64 {
        let block = &self.blocks[&self.block_of(cluster)];
        get(&block.bytes, self.g.refcount_order, self.index_of(cluster))
    }

    /// The cluster's block is in memory.
    pub(super) fn set(&mut self, cluster: u64, count: u64) {
        let (number, index) = (self.block_of(cluster), self.index_of(cluster));
        let order = self.g.refcount_order;
        let block = self.blocks.get_mut(&number).expect("it is in memory");
        set(&mut block.bytes, order, index, count);
        // Whole sectors, which are what can be written.
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

    /// Returned clusters in a row whose refcounts are in memory, in one block.
    fn first_returned(&self) -> Option<Range<u64>> {
        let in_memory = |run: &Range<u64>| self.blocks.contains_key(&self.block_of(run.start));
        let run = self.returned.iter().take(RETURNED_TRIED).find(in_memory)?;
        let block_end = (self.block_of(run.start) + 1) * self.g.refcount_block_entries();
        Some(run.start..run.end.min(block_end))
    }

    /// The block of a free cluster that cannot be taken since its refcount is
    /// not in memory.
    fn block_of_returned(&mut self) -> Option<u64> {
        let number = self.block_of(self.returned.iter().next()?.start);
        (!self.blocks.contains_key(&number)).then_some(number)
    }

    pub(super) fn give_back(&mut self, run: &Run) {
        for cluster in run.clusters.clone() {
            // Else it is a leak: its block has left memory meanwhile.
            if self.blocks.contains_key(&self.block_of(cluster)) {
                self.set(cluster, 0);
                self.returned.insert(cluster..cluster + 1);
            }
        }
    }

    /// Freed clusters that no request in flight can use any more can be taken again: at once, or after they have been
    /// discarded. Returns how many can be taken.
    pub(super) fn reuse(&mut self, discard: bool) -> u64 {
        if self.freed.is_empty() {
            return 0;
        }
        // An epoch ends with each call, if nothing older is in flight.
        let reusable = (0..3).filter_map(|_| self.epochs.reusable()).max();
        let unused = |(epoch, _): &(u64, Range<u64>)| reusable.is_some_and(|r| *epoch <= r);
        let count = self.freed.iter().take_while(|freed| unused(freed)).count();
        // (Runs that were freed one after the other may be one.)
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

    /// Freed clusters wait for requests in flight, or for their discard.
    pub(in crate::served) fn has_freed(&self) -> bool {
        !self.freed.is_empty() || !self.discarding.is_empty()
    }

    pub(super) fn has_to_discard(&self) -> bool {
        !self.to_discard.is_empty()
    }

    /// Takes some of the runs that wait for their discard.
    pub(super) fn next_to_discard(&mut self, most: usize) -> Vec<Range<u64>> {
        let most = most.min(self.to_discard.len());
        self.to_discard.drain(..most).collect()
    }

    /// These clusters have been discarded: they can be taken again.
    pub(super) fn discarded(&mut self, run: Range<u64>) {
        self.discarding.remove(&run);
        self.returned.insert(run);
    }

    /// One reference less; true if it was the last. The cluster's block is in
    /// memory.
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
            // Whoever takes the cluster next takes all of it.
            self.open = None;
        }
        Ok(count == 1)
    }

    /// The clusters, of refcount 0, can be used again once no request in
    /// flight can be using them.
    pub(super) fn freed(&mut self, clusters: Runs) {
        let now = self.epochs.now();
        self.freed
            .extend(clusters.into_iter().map(|run| (now, run)));
    }

    /// What is in memory only, as of now; it counts as written from now on.
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

    /// Writing that failed: all of it is to be written again. Returns the
    /// place of a table, offset and bytes, that was moved again meanwhile.
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

    /// Lets clean blocks go that are not searched. The caller has the lock of
    /// the search, and nothing is being written.
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

    /// Where the block is that has to be read before this one's refcounts are
    /// known: None if it is in memory.
    fn missing(&self, number: u64) -> Option<HostOffset> {
        let at = self.table.get(number as usize).copied().unwrap_or(0);
        (at != 0 && !self.blocks.contains_key(&number)).then_some(HostOffset(at))
    }

    /// The first block that the table has no room for, if it has none for this
    /// one.
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

    /// Makes the missing block `number`, and a longer table if the block has no entry in it. Both go
    /// to the start of the clusters that the block counts, which are free.
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
                self.reserve_refcounts(io, number).await?;
            }
            let mut state = self.state();
            let state = &mut *state;
            let space = super::refcounts(state).ok_or(libc::EROFS)?;
            if !space.blocks.contains_key(&number) {
                self.make_refcounts(state, number)?;
            }
            let space = super::refcounts(state).ok_or(libc::EROFS)?;
            space.scan(number);
            space.next = number + 1;
            if !space.free.is_empty() {
                return Ok(());
            }
        }
    }

    /// Takes the file system's space for a new block while a request can still
    /// be told that there is none: a flush that finds none would fail, and
    /// with it every way to make room.
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
        self.used
            .fetch_max(end, std::sync::atomic::Ordering::Relaxed);
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

    /// The cluster is in use by what a predecessor had in memory. Returns its
    /// refcount. Callers go from lower clusters to higher ones.
    pub(in crate::served) async fn claim_refcount(
        &self,
        io: &impl Io,
        cluster: u64,
    ) -> Result<u64, Errno> {
        let _searching = self.searching.lock_all().await;
        let number = self.refcounts(|r| r.block_of(cluster))?;
        self.load_refcounts(io, number).await?;
        // The predecessor has made one block after the other, and the table
        // longer with the first that it had no room for. Nothing that is known
        // of may be in that one's part of the file, but the table is there.
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

    /// A refcount table was moved again before it was used.
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

    /// The refcounts of the cluster are in memory afterwards, if the image
    /// has any. The caller has the lock of the search.
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
