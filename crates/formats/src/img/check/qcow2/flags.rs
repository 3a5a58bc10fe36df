//! The copied flags, which say that a refcount is exactly one.

use super::Pass;
use crate::Result;
use crate::img::check::Repair;
use crate::qcow2::{L1Entry, L2Entry};

impl Pass<'_, '_> {
    /// Checks all flags below the active L1 table against the refcounts.
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
        self.for_each_word(offset, bytes, |pass, at, word| {
            let entry = L1Entry(word);
            let Some((table, _)) = bounds.inspect_l1(entry).refers_to else {
                return Ok(());
            };
            let single = pass.single.get(table >> pass.g.cluster_bits);
            if single == entry.copied() {
                return Ok(());
            }
            let text = format!("copied flag of L1 entry {word:#x}");
            pass.flag(&text, repair);
            if repair {
                let entry = entry.with_copied(single);
                pass.write(&entry.0.to_be_bytes(), at)?;
            }
            Ok(())
        })?;
        let active = self.tables.iter().filter(|(_, uses)| uses.active > 0);
        let active: Vec<_> = active.map(|(at, uses)| (*at, uses.total)).collect();
        for (table, uses) in active {
            // A table that is something else, too, is not written to.
            let alone = self.counts.get(table >> self.g.cluster_bits) == uses;
            self.check_l2_flags(table, repair && alone)?;
        }
        Ok(())
    }

    fn flag(&mut self, text: &str, repair: bool) {
        if repair {
            self.repairing(text);
        } else {
            self.corruption(text);
        }
    }

    fn check_l2_flags(&mut self, offset: u64, repair: bool) -> Result<()> {
        let mut table = vec![0; self.g.cluster_size() as usize];
        self.read(&mut table, offset)?;
        let size = self.g.l2_entry_size() as usize;
        let mut changed = false;
        for at in (0..table.len()).step_by(size) {
            let entry = L2Entry::parse(&table, at, &self.g);
            let host = entry.raw_offset();
            let allocated = host != 0 || self.g.data_file && entry.copied();
            if entry.is_compressed() || !allocated {
                continue;
            }
            let single = self.g.data_file || self.single.get(host >> self.g.cluster_bits);
            if single != entry.copied() {
                let text = format!("copied flag of L2 entry {:#x}", entry.descriptor);
                self.flag(&text, repair);
                entry.with_copied(single).encode(&mut table, at, &self.g);
                changed = true;
            }
        }
        if changed && repair {
            self.write(&table, offset)?;
        }
        Ok(())
    }
}
