//! Compares the refcounts in the file with the counted references.

use super::Pass;
use crate::offline::check::Repair;
use crate::qcow2::refcount::{self, TableEntry};
use crate::{HostOffset, Result};

/// Maximum number of ranges of freed clusters in memory.
const MAX_FREED: usize = 1 << 16;

impl Pass<'_, '_> {
    /// Counts the clusters of the refcount table and of its blocks, and determines whether they can
    /// be used.
    pub(super) fn count_refcount_structures(&mut self) -> Result<()> {
        let (offset, bytes) = (
            self.header.refcount_table_offset,
            self.header.refcount_table_bytes(),
        );
        if let Err(error) = self.header.validate_refcount_table() {
            return self.unusable_table(&error.to_string());
        }
        if !self.in_file(offset, bytes) {
            self.unusable_table("the refcount table is beyond the end of the file")?;
        } else {
            self.count(offset, bytes, 1);
        }
        let last = (self.counts.len() - 1) >> self.g.refcount_block_bits();
        self.blocks = vec![HostOffset(0); last as usize + 1];
        self.for_each_word(offset, bytes, |pass, at, word| {
            let index = (at - offset) / TableEntry::SIZE;
            match TableEntry(word).block(&pass.g) {
                Err(error) => pass.bad_block(index, &error.to_string()),
                Ok(None) => {}
                Ok(Some(block)) if !pass.in_file(block, pass.g.cluster_size()) => {
                    pass.bad_block(index, "it is beyond the end of the file");
                }
                Ok(Some(block)) => {
                    pass.count(block, pass.g.cluster_size(), 1);
                    let index = index as usize;
                    if index >= pass.blocks.len() {
                        // The file's table has more entries than the file has clusters.
                        pass.blocks.resize(index + 1, HostOffset(0));
                    }
                    pass.blocks[index] = block;
                }
            }
            Ok(())
        })?;
        self.check_table_is_alone();
        self.check_blocks_are_alone();
        Ok(())
    }

    fn unusable_table(&mut self, problem: &str) -> Result<()> {
        self.rebuild = true;
        self.corruption(problem);
        Ok(())
    }

    fn bad_block(&mut self, index: u64, problem: &str) {
        self.rebuild = true;
        self.corruption(&format!("refcount block {index}: {problem}"));
    }

    /// Checks that the refcount table has no other user. The table is written in place without
    /// consulting its refcount.
    fn check_table_is_alone(&mut self) {
        let bits = self.g.cluster_bits;
        let first = self.header.refcount_table_offset.cluster(bits);
        let clusters = first..first + u64::from(self.header.refcount_table_clusters);
        if clusters.clone().any(|c| self.counts.get(c) > 1) {
            self.rebuild = true;
            self.corruption("the refcount table is in clusters that are something else, too");
        }
    }

    /// Checks that no refcount block has another user. A refcount block with another user cannot be
    /// written to.
    fn check_blocks_are_alone(&mut self) {
        for index in 0..self.blocks.len() {
            let block = self.blocks[index];
            let count = self.counts.get(block.cluster(self.g.cluster_bits));
            if block.0 != 0 && count != 1 {
                let text = format!("its cluster is referred to {count} times");
                self.bad_block(index as u64, &text);
            }
        }
    }

    pub(super) fn compare_refcounts(&mut self) -> Result<()> {
        let mut block = vec![0; self.g.cluster_size() as usize];
        let mut end = 0;
        // Refcounts that must be rebuilt are not corrected in place: a block may share its cluster
        // with guest data or other metadata, which a correction would overwrite.
        let in_place = !self.rebuild;
        let blocks = self.counts.len().div_ceil(self.g.refcount_block_entries());
        for index in 0..blocks {
            let at = self.blocks.get(index as usize).copied();
            let at = at.unwrap_or_default();
            let first = index << self.g.refcount_block_bits();
            let last = (first + self.g.refcount_block_entries()).min(self.counts.len());
            if at.0 != 0 {
                self.read(&mut block, at)?;
            } else if !self.counts.any(first..last) {
                continue;
            }
            let mut changed = false;
            for cluster in first..last {
                let entry = (cluster - first) as usize;
                let order = self.g.refcount_order;
                let stored = if at.0 == 0 {
                    0
                } else {
                    refcount::get(&block, order, entry)
                };
                let counted = self.counts.get(cluster);
                if stored != 0 || counted != 0 {
                    end = cluster + 1;
                }
                let mut now = stored;
                if stored != counted
                    && self.may_correct(cluster, stored, counted, at.0 != 0 && in_place)
                {
                    now = counted;
                    refcount::set(&mut block, order, entry, counted);
                    changed = true;
                }
                if now == 1 {
                    self.single.set(cluster);
                }
            }
            if changed {
                self.write(&block, at)?;
            }
        }
        self.report.image_end_offset = end << self.g.cluster_bits;
        Ok(())
    }

    /// Whether leaked clusters may be freed. If tables are broken and were not repaired, their
    /// clusters look leaked and must not be lost as well.
    fn may_free(&self) -> bool {
        self.repair != Repair::Nothing && !self.broken_structure
    }

    /// Records a cluster to be discarded once its refcount is durable.
    fn free(&mut self, cluster: u64) {
        let room = self.freed.len() < MAX_FREED;
        match self.freed.last_mut() {
            Some(last) if last.end == cluster => last.end += 1,
            // A range that is not recorded only wastes space.
            _ if room => self.freed.push(cluster..cluster + 1),
            _ => {}
        }
    }

    /// Ends a repair of leaks that would need new refcount blocks, as `qemu-img check` does. Only
    /// `Repair::All` writes new blocks.
    pub(super) fn refuse_rebuild(&mut self) {
        self.report.check_errors += 1;
        self.lines.say(
            "ERROR the refcount blocks must be rebuilt before leaks can be repaired; \
             use `--repair all`",
        );
    }

    /// Reports a wrong refcount. Returns whether to correct the refcount in place.
    fn may_correct(&mut self, cluster: u64, stored: u64, counted: u64, possible: bool) -> bool {
        // Beyond the end of the file, only referenced clusters matter.
        if counted == 0 && cluster >= self.g.clusters_of(self.file_len) {
            return false;
        }
        let text = format!("cluster {cluster} refcount={stored} reference={counted}");
        if stored > counted {
            if possible && self.may_free() {
                self.lines.say(&format!("Repairing {text}"));
                self.report.leaks_fixed += 1;
                if counted == 0 {
                    self.free(cluster);
                }
                return true;
            }
            self.report.leaks += 1;
            if self.repair == Repair::Nothing {
                self.lines.say(&format!("Leaked {text}"));
            }
            return false;
        }
        if counted > self.g.refcount_max() {
            let bits = self.g.refcount_bits();
            self.corruption(&format!(
                "{text}: more than {bits} bits can hold; qemu-img convert makes a clean copy"
            ));
            return false;
        }
        if possible && self.repair == Repair::All {
            self.repairing(&text);
            return true;
        }
        // The refcount has no block, or one that cannot be written to. As in QEMU, a repair of
        // leaks needs new blocks only if the refcount is 0.
        self.rebuild |= self.repair == Repair::All || stored == 0;
        self.corruption(&text);
        false
    }
}
