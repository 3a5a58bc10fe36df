//! Checks the copied flags, which mean that a refcount is exactly one.

use super::Pass;
use crate::offline::check::Repair;
use crate::qcow2::{INCOMPATIBLE_DIRTY, L1Entry, L2Entry, refcount};
use crate::{HostOffset, Result};

impl Pass<'_, '_> {
    /// Checks all copied flags below the active L1 table against the refcounts.
    ///
    /// A repair of leaks does not write to a table whose cluster has another user.
    pub(super) fn check_flags(&mut self) -> Result<()> {
        let clean = self.report.corruptions + self.report.leaks + self.report.check_errors == 0;
        let repair = match self.repair {
            Repair::All => true,
            Repair::Leaks => clean,
            Repair::Nothing => false,
        };
        let (offset, entries) = (self.header.l1_offset, self.header.l1_entries);
        let bytes = u64::from(entries) * L1Entry::SIZE;
        let bounds = self.bounds();
        let l1_repair = repair && self.may_write(offset, bytes, 1);
        self.for_each_word(offset, bytes, |pass, at, word| {
            let entry = L1Entry(word);
            let Some((table, _)) = bounds.inspect_l1(entry).refers_to else {
                return Ok(());
            };
            let single = pass.single.get(table.cluster(pass.g.cluster_bits));
            if single == entry.copied() {
                return Ok(());
            }
            let text = format!("copied flag of L1 entry {word:#x}");
            pass.flag(&text, l1_repair);
            if l1_repair {
                let entry = entry.with_copied(single);
                pass.write(&entry.0.to_be_bytes(), at)?;
            }
            Ok(())
        })?;
        let active = self.tables.iter().filter(|(_, uses)| uses.active > 0);
        let active: Vec<_> = active.map(|(at, uses)| (*at, uses.total)).collect();
        let mut moved = Vec::new();
        for (table, uses) in active {
            let repair = repair && self.may_write(table, self.g.cluster_size(), uses);
            let Some(right) = self.check_l2_flags(table, repair)? else {
                continue;
            };
            if self.is_alone(table, self.g.cluster_size(), uses) {
                self.write(&right, table)?;
            } else {
                moved.push((table, self.append(&right)?));
            }
        }
        self.switch_l2_tables(&moved)
    }

    /// Whether this repair may correct flags in a table that has `uses` references.
    fn may_write(&self, table: HostOffset, bytes: u64, uses: u64) -> bool {
        self.repair == Repair::All || self.is_alone(table, bytes, uses)
    }

    /// Writes a table to the end of the file, before anything refers to the table.
    ///
    /// If its refcount cannot be written, the next pass does that. Meanwhile the image is marked
    /// dirty: after a crash, a program might otherwise take the table for free space.
    fn append(&mut self, table: &[u8]) -> Result<HostOffset> {
        let at = self.end();
        self.write(table, at)?;
        self.file_len = at.0 + self.g.cluster_size();
        if !self.claim(at.cluster(self.g.cluster_bits))? {
            self.mark_dirty()?;
        }
        Ok(at)
    }

    /// Sets the refcount of a new cluster to one. Returns false if its refcount block does not
    /// exist or cannot be used.
    fn claim(&mut self, cluster: u64) -> Result<bool> {
        let bits = self.g.refcount_block_bits();
        let block = self.blocks.get((cluster >> bits) as usize);
        let Some(at) = block.copied().filter(|at| at.0 != 0 && !self.rebuild) else {
            return Ok(false);
        };
        let mut block = vec![0; self.g.cluster_size() as usize];
        self.read(&mut block, at)?;
        let entry = cluster & (self.g.refcount_block_entries() - 1);
        refcount::set(&mut block, self.g.refcount_order, entry as usize, 1);
        self.write(&block, at)?;
        Ok(true)
    }

    /// Sets the dirty bit, which only images of version 3 have. A successful repair clears it.
    fn mark_dirty(&mut self) -> Result<()> {
        if self.header.version < 3 {
            return Ok(());
        }
        self.header.incompatible |= INCOMPATIBLE_DIRTY;
        let bits = self.header.incompatible.to_be_bytes();
        self.write(&bits, HostOffset(72))
    }

    /// Makes the active L1 table refer to copies of L2 tables. The original clusters have other
    /// users and were therefore not written to. `moved` is sorted by the old offset.
    fn switch_l2_tables(&mut self, moved: &[(HostOffset, HostOffset)]) -> Result<()> {
        if moved.is_empty() {
            return Ok(());
        }
        self.sync()?;
        let bytes = u64::from(self.header.l1_entries) * L1Entry::SIZE;
        self.for_each_word(self.header.l1_offset, bytes, |pass, at, word| {
            let table = L1Entry(word).raw_offset();
            let Ok(found) = moved.binary_search_by_key(&table, |(old, _)| *old) else {
                return Ok(());
            };
            let entry = L1Entry::new(moved[found].1, true);
            pass.write(&entry.0.to_be_bytes(), at)
        })
    }

    fn flag(&mut self, text: &str, repair: bool) {
        if repair {
            self.repairing(text);
        } else {
            self.corruption(text);
        }
    }

    /// Checks the copied flags of an L2 table. Returns the corrected table if flags are wrong and
    /// `repair` is set.
    fn check_l2_flags(&mut self, offset: HostOffset, repair: bool) -> Result<Option<Vec<u8>>> {
        let mut table = vec![0; self.g.cluster_size() as usize];
        self.read(&mut table, offset)?;
        let size = self.g.l2_entry_size() as usize;
        let mut changed = false;
        for at in (0..table.len()).step_by(size) {
            let entry = L2Entry::parse(&table, at, &self.g);
            let host = entry.raw_offset();
            let allocated = host.0 != 0 || self.g.data_file && entry.copied();
            if entry.is_compressed() || !allocated {
                continue;
            }
            let single = self.g.data_file || self.single.get(host.cluster(self.g.cluster_bits));
            if single != entry.copied() {
                let text = format!("copied flag of L2 entry {:#x}", entry.descriptor);
                self.flag(&text, repair);
                entry.with_copied(single).encode(&mut table, at, &self.g);
                changed = true;
            }
        }
        Ok((changed && repair).then_some(table))
    }
}
