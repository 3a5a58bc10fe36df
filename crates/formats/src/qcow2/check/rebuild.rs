//! Rebuilds the refcount structures at the end of the file.

use super::Pass;
use crate::qcow2::{MAX_REFCOUNT_TABLE_BYTES, refcount};
use crate::{Error, HostOffset, Result};

/// The layout of the new refcount structures.
struct Plan {
    /// Number of the first new cluster. The new clusters hold the blocks, then the table.
    first: u64,
    /// Indexes of the refcount blocks that will exist.
    indexes: Vec<u64>,
    table_clusters: u64,
}

impl Pass<'_, '_> {
    /// Writes all counted refcounts to new clusters, then switches the header to them. Until that
    /// last write, of one sector, the image is unchanged. After the write, the old structures are
    /// free space.
    pub(super) fn rebuild_refcounts(&mut self) -> Result<()> {
        self.forget_old();
        let plan = self.plan()?;
        let new = plan.indexes.len() as u64 + plan.table_clusters;
        self.counts.grow(plan.first + new);
        for cluster in plan.first..plan.first + new {
            self.counts.add(cluster, 1);
        }
        self.file
            .set_len((plan.first + new) << self.g.cluster_bits)
            .map_err(Error::io("cannot extend the file"))?;
        let mut table = vec![0; (plan.table_clusters << self.g.cluster_bits) as usize];
        for (i, &index) in plan.indexes.iter().enumerate() {
            let at = HostOffset::of_cluster(plan.first + i as u64, self.g.cluster_bits);
            let block = self.block_of(index);
            self.write(&block, at)?;
            let entry = index as usize * 8;
            table[entry..entry + 8].copy_from_slice(&at.0.to_be_bytes());
        }
        let table_at = plan.first + plan.indexes.len() as u64;
        let table_at = HostOffset::of_cluster(table_at, self.g.cluster_bits);
        self.write(&table, table_at)?;
        self.sync()?;
        let mut switch = [0; 12];
        switch[..8].copy_from_slice(&table_at.0.to_be_bytes());
        switch[8..].copy_from_slice(&(plan.table_clusters as u32).to_be_bytes());
        self.write(&switch, HostOffset(48))?;
        self.sync()?;
        self.lines.say("Repairing refcounts, which are built anew");
        // The rebuild repairs all refcount errors.
        self.report.corruptions_fixed += self.report.corruptions.max(1);
        self.report.leaks_fixed += self.report.leaks;
        Ok(())
    }

    /// Removes the references to the old structures.
    fn forget_old(&mut self) {
        let table = self.header.refcount_table_offset;
        let bytes = self.header.refcount_table_bytes();
        let bits = self.g.cluster_bits;
        let counted = self.header.validate_refcount_table().is_ok() && self.in_file(table, bytes);
        if counted {
            for cluster in table.clusters(bytes, bits) {
                self.counts.remove(cluster);
            }
        }
        for block in std::mem::take(&mut self.blocks) {
            if block.0 != 0 {
                self.counts.remove(block.cluster(bits));
            }
        }
    }

    fn plan(&self) -> Result<Plan> {
        let entries = self.g.refcount_block_entries();
        let first = self.g.clusters_of(self.file_len).max(self.counts.end());
        let used = |index: &u64| {
            let start = index * entries;
            self.counts.any(start..start + entries)
        };
        let old: Vec<u64> = (0..first.div_ceil(entries)).filter(used).collect();
        let (mut blocks, mut table_clusters) = (0, 0);
        loop {
            // The new clusters need refcount blocks, too. The last old block may cover some of
            // them.
            let end = first + blocks + table_clusters;
            let new = first / entries..end.div_ceil(entries);
            let mut indexes = old.clone();
            indexes.extend(new.filter(|i| old.last() != Some(i)));
            let last = indexes.last().copied().unwrap_or(0);
            let table = self.g.clusters_of((last + 1) * 8);
            if indexes.len() as u64 == blocks && table == table_clusters {
                if table << self.g.cluster_bits > MAX_REFCOUNT_TABLE_BYTES {
                    return Err(Error::unsupported(
                        "its refcount table would be too large to be rebuilt",
                    ));
                }
                return Ok(Plan {
                    first,
                    indexes,
                    table_clusters,
                });
            }
            // Both numbers only grow, so the loop ends.
            (blocks, table_clusters) = (indexes.len() as u64, table);
        }
    }

    fn block_of(&self, index: u64) -> Vec<u8> {
        let mut block = vec![0; self.g.cluster_size() as usize];
        let first = index << self.g.refcount_block_bits();
        for entry in 0..self.g.refcount_block_entries() {
            let count = self.counts.get(first + entry);
            if count != 0 {
                let count = count.min(self.g.refcount_max());
                refcount::set(&mut block, self.g.refcount_order, entry as usize, count);
            }
        }
        block
    }
}
