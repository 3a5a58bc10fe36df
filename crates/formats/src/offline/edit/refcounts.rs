//! Refcounts of an image that is being changed.

use super::clusters::Clusters;
use crate::qcow2::refcount::{self, TableEntry};
use crate::qcow2::{Geometry, Header, MAX_REFCOUNT_TABLE_BYTES};
use crate::{Error, HostOffset, Result};
use fathom_core::is_zero;
use fathom_files::ImageFile;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Maximum size in bytes of the refcount blocks in memory.
const MAX_BYTES: u64 = 1 << 30;

struct Block {
    bytes: Vec<u8>,
    /// Whether the block has got a new place since the last commit.
    placed: bool,
}

fn no_room() -> Error {
    Error::unsupported(
        "its refcount table would exceed the limit; use larger clusters or narrower refcounts",
    )
}

/// Refcounts as they will be after the commit. Blocks are read on demand.
pub(super) struct Refcounts<'a> {
    file: &'a dyn ImageFile,
    g: Geometry,
    /// Offsets of the refcount blocks; 0 for missing blocks.
    table: Vec<HostOffset>,
    blocks: BTreeMap<u64, Block>,
    /// Blocks that have changed since the last commit and have no new place yet.
    homeless: BTreeSet<u64>,
    /// Offset and number of clusters of the refcount table. With `moved`, that of a new table.
    place: (HostOffset, u64),
    moved: bool,
    /// Clusters that are free in the new image but not in the old image.
    freed: Clusters,
    /// Clusters that are free in the old image but not in the new image.
    taken: Clusters,
    /// No cluster before this one is free.
    first_free: u64,
}

impl<'a> Refcounts<'a> {
    pub(super) fn read(file: &'a dyn ImageFile, header: &Header) -> Result<Refcounts<'a>> {
        let g = header.geometry();
        // The header's validation bounds the size.
        let mut bytes = vec![0; header.refcount_table_bytes() as usize];
        file.read_at(&mut bytes, header.refcount_table_offset.0)
            .map_err(Error::io("cannot read its refcount table"))?;
        let entry = |word: &[u8]| {
            let word = TableEntry(u64::from_be_bytes(word.try_into().unwrap_or_default()));
            let block = word.block(&g);
            block.map_err(|e| Error::invalid(format!("refcount table: {e}")))
        };
        let table = bytes
            .chunks_exact(8)
            .map(|w| Ok(entry(w)?.unwrap_or_default()));
        let clusters = u64::from(header.refcount_table_clusters);
        Ok(Refcounts {
            file,
            g,
            table: table.collect::<Result<_>>()?,
            blocks: BTreeMap::new(),
            homeless: BTreeSet::new(),
            place: (header.refcount_table_offset, clusters),
            moved: false,
            freed: Clusters::default(),
            taken: Clusters::default(),
            first_free: 0,
        })
    }

    fn at(&self, cluster: u64) -> (u64, usize) {
        let bits = self.g.refcount_block_bits();
        (cluster >> bits, (cluster & ((1 << bits) - 1)) as usize)
    }

    fn place_of(&self, index: u64) -> HostOffset {
        let place = self.table.get(index as usize);
        place.copied().unwrap_or_default()
    }

    /// Returns a refcount block, reading it if necessary; `None` if there is no such block.
    fn block(&mut self, index: u64) -> Result<Option<&mut Block>> {
        if !self.blocks.contains_key(&index) {
            let place = self.place_of(index);
            if place.0 == 0 {
                return Ok(None);
            }
            let mut block = self.new_block()?;
            self.file
                .read_at(&mut block.bytes, place.0)
                .map_err(Error::io("cannot read its refcounts"))?;
            self.blocks.insert(index, block);
        }
        Ok(self.blocks.get_mut(&index))
    }

    fn new_block(&self) -> Result<Block> {
        let size = self.g.cluster_size();
        if (self.blocks.len() as u64 + 1) * size > MAX_BYTES {
            return Err(Error::unsupported("its refcounts exceed 1 GiB of memory"));
        }
        Ok(Block {
            bytes: vec![0; size as usize],
            placed: false,
        })
    }

    pub(super) fn get(&mut self, cluster: u64) -> Result<u64> {
        let (index, entry) = self.at(cluster);
        let order = self.g.refcount_order;
        let block = self.block(index)?;
        Ok(block.map_or(0, |block| refcount::get(&block.bytes, order, entry)))
    }

    fn set(&mut self, cluster: u64, value: u64) -> Result<()> {
        let (index, entry) = self.at(cluster);
        if self.block(index)?.is_none() {
            if index >= MAX_REFCOUNT_TABLE_BYTES / TableEntry::SIZE {
                return Err(no_room());
            }
            let block = self.new_block()?;
            self.blocks.insert(index, block);
        }
        let order = self.g.refcount_order;
        if let Some(block) = self.blocks.get_mut(&index) {
            refcount::set(&mut block.bytes, order, entry, value);
            if !block.placed {
                self.homeless.insert(index);
            }
        }
        Ok(())
    }

    /// Changes the width of all refcounts. The refcounts move to new blocks, which a new table will
    /// point to.
    pub(super) fn set_order(&mut self, order: u32) -> Result<()> {
        let old = self.g;
        let mut new = Refcounts {
            file: self.file,
            g: Geometry {
                refcount_order: order,
                ..old
            },
            table: Vec::new(),
            blocks: BTreeMap::new(),
            homeless: BTreeSet::new(),
            place: self.place,
            moved: self.moved,
            freed: std::mem::take(&mut self.freed),
            taken: std::mem::take(&mut self.taken),
            first_free: self.first_free,
        };
        let last = self.blocks.keys().next_back().map_or(0, |last| last + 1);
        for index in 0..last.max(self.table.len() as u64) {
            self.block(index)?;
            let Some(block) = self.blocks.remove(&index) else {
                continue;
            };
            if is_zero(&block.bytes) {
                continue;
            }
            for entry in 0..old.refcount_block_entries() {
                let count = refcount::get(&block.bytes, old.refcount_order, entry as usize);
                if count > new.g.refcount_max() {
                    return Err(Error::unsupported(format!(
                        "a cluster has {count} references, which refcounts of {} bits cannot \
                         express; delete snapshots first, or use more bits",
                        new.g.refcount_bits()
                    )));
                }
                if count > 0 {
                    new.set((index << old.refcount_block_bits()) + entry, count)?;
                }
            }
        }
        for place in self.table.iter().filter(|place| place.0 != 0) {
            new.release(*place, old.cluster_size())?;
        }
        *self = new;
        Ok(())
    }

    fn clusters(&self, offset: HostOffset, len: u64) -> Range<u64> {
        offset.clusters(len, self.g.cluster_bits)
    }

    pub(super) fn reference(&mut self, offset: HostOffset, len: u64) -> Result<()> {
        for cluster in self.clusters(offset, len) {
            let count = self.get(cluster)?;
            if count == self.g.refcount_max() {
                let (bits, max) = (self.g.refcount_bits(), self.g.refcount_max());
                return Err(Error::unsupported(format!(
                    "a cluster would have more than {max} references, which refcounts of {bits} \
                     bits cannot express"
                )));
            }
            self.set(cluster, count + 1)?;
            self.freed.remove(cluster);
        }
        Ok(())
    }

    pub(super) fn release(&mut self, offset: HostOffset, len: u64) -> Result<()> {
        for cluster in self.clusters(offset, len) {
            match self.get(cluster)? {
                0 => {
                    let at = cluster << self.g.cluster_bits;
                    return Err(Error::invalid(format!(
                        "the cluster at {at:#x} is in use and has no refcount"
                    )));
                }
                1 => {
                    self.freed.insert(cluster);
                    self.set(cluster, 0)?;
                }
                count => self.set(cluster, count - 1)?,
            }
        }
        Ok(())
    }

    /// Whether a cluster is free in the new image and in the old image.
    fn is_free(&mut self, cluster: u64) -> Result<bool> {
        Ok(!self.freed.contains(cluster) && self.get(cluster)? == 0)
    }

    pub(super) fn allocate(&mut self, clusters: u64) -> Result<HostOffset> {
        while !self.is_free(self.first_free)? {
            self.first_free += 1;
        }
        self.allocate_from(self.first_free, clusters)
    }

    pub(super) fn allocate_at_end(&mut self, clusters: u64) -> Result<HostOffset> {
        let start = self.end()?.max(self.freed.end());
        self.allocate_from(start, clusters)
    }

    fn allocate_from(&mut self, start: u64, clusters: u64) -> Result<HostOffset> {
        let (mut start, mut run) = (start, 0);
        while run < clusters {
            match self.is_free(start + run)? {
                true => run += 1,
                false => (start, run) = (start + run + 1, 0),
            }
        }
        let (last, _) = self.at(start + clusters);
        if last >= MAX_REFCOUNT_TABLE_BYTES / TableEntry::SIZE {
            return Err(no_room());
        }
        for cluster in start..start + clusters {
            self.taken.insert(cluster);
            self.set(cluster, 1)?;
        }
        Ok(HostOffset::of_cluster(start, self.g.cluster_bits))
    }

    pub(super) fn are_new(&self, offset: HostOffset, len: u64) -> bool {
        let mut clusters = self.clusters(offset, len);
        clusters.all(|cluster| self.taken.contains(cluster))
    }

    /// Number of the last cluster in use, plus one.
    pub(super) fn end(&mut self) -> Result<u64> {
        let last = self.blocks.keys().next_back().map_or(0, |last| last + 1);
        let order = self.g.refcount_order;
        for index in (0..last.max(self.table.len() as u64)).rev() {
            let entries = self.g.refcount_block_entries();
            let Some(block) = self.block(index)? else {
                continue;
            };
            let is_used = |entry: &u64| refcount::get(&block.bytes, order, *entry as usize) != 0;
            if let Some(entry) = (0..entries).rev().find(is_used) {
                return Ok((index << self.g.refcount_block_bits()) + entry + 1);
            }
        }
        Ok(0)
    }

    /// Allocates new places for the changed blocks and for the table. These allocations change
    /// further blocks, so this repeats until nothing changes.
    pub(super) fn place(&mut self, header: &mut Header) -> Result<()> {
        self.place_blocks()?;
        while self.blocks.values().any(|block| block.placed) {
            let needed = self
                .g
                .clusters_of(self.table.len() as u64 * TableEntry::SIZE);
            if self.moved && self.place.1 >= needed {
                break;
            }
            let (old, clusters) = self.place;
            self.release(old, clusters << self.g.cluster_bits)?;
            let clusters = clusters.max(needed);
            self.place = (self.allocate(clusters)?, clusters);
            self.moved = true;
            self.place_blocks()?;
        }
        header.refcount_table_offset = self.place.0;
        header.refcount_table_clusters = self.place.1 as u32;
        Ok(())
    }

    fn place_blocks(&mut self) -> Result<()> {
        while let Some(index) = self.homeless.pop_first() {
            if let Some(block) = self.blocks.get_mut(&index) {
                block.placed = true;
            }
            let old = self.place_of(index);
            if old.0 != 0 {
                self.release(old, self.g.cluster_size())?;
            }
            let place = self.allocate(1)?;
            if index as usize >= self.table.len() {
                self.table.resize(index as usize + 1, HostOffset(0));
            }
            self.table[index as usize] = place;
        }
        Ok(())
    }

    /// Writes the blocks and the table that have got new places.
    pub(super) fn write(&self) -> Result<()> {
        let write = |bytes: &[u8], at: HostOffset| {
            debug_assert!(self.are_new(at, bytes.len() as u64));
            let written = self.file.write_at(bytes, at.0);
            written.map_err(Error::io("cannot write its refcounts"))
        };
        for (index, block) in self.blocks.iter().filter(|(_, b)| b.placed) {
            write(&block.bytes, self.place_of(*index))?;
        }
        if self.moved {
            let words = self.table.iter().flat_map(|place| place.0.to_be_bytes());
            let mut bytes: Vec<u8> = words.collect();
            bytes.resize((self.place.1 << self.g.cluster_bits) as usize, 0);
            write(&bytes, self.place.0)?;
        }
        Ok(())
    }

    /// Makes the new image the reference for later changes. Returns the clusters that have become
    /// free.
    pub(super) fn settle(&mut self) -> Vec<Range<u64>> {
        for block in self.blocks.values_mut() {
            block.placed = false;
        }
        self.moved = false;
        self.first_free = 0;
        self.taken = Clusters::default();
        std::mem::take(&mut self.freed).ranges()
    }
}
