//! Repairs invalid entries.

use super::{Pass, Uses};
use crate::offline::info::snapshot_table_bytes;
use crate::qcow2::bitmap::TableEntry;
use crate::qcow2::snapshot::Snapshot;
use crate::qcow2::{L1Entry, L2Entry};
use crate::{HostOffset, Result};

impl Pass<'_, '_> {
    /// Repairs the problems found by counting. After any repair, the counted references are no
    /// longer valid.
    pub(super) fn repair_structure(&mut self) -> Result<()> {
        self.extend_l1()?;
        if self.report.repaired() {
            return Ok(());
        }
        self.repair_snapshot_table()?;
        let doomed = self.repair_l2_tables()?;
        self.repair_l1_tables(&doomed)?;
        self.repair_bitmaps()
    }

    /// Extends the file if it ends within the L1 table. The missing part already reads as zeroes.
    fn extend_l1(&mut self) -> Result<()> {
        let bytes = u64::from(self.header.l1_entries) * L1Entry::SIZE;
        if self.in_file(self.header.l1_offset, bytes) {
            return Ok(());
        }
        self.repairing("L1 table, which the file ends in: it is extended");
        self.file
            .set_len(self.header.l1_offset.0 + bytes)
            .map_err(crate::Error::io("cannot extend the file"))
    }

    /// Repairs L2 tables with broken entries. Returns, sorted, the offsets of tables whose clusters
    /// have other users and therefore cannot be written to.
    fn repair_l2_tables(&mut self) -> Result<Vec<HostOffset>> {
        let broken = self.tables.iter().filter(|(_, uses)| uses.broken);
        let broken: Vec<(HostOffset, Uses)> = broken.map(|(at, uses)| (*at, *uses)).collect();
        let mut doomed = Vec::new();
        for (offset, uses) in broken {
            if self.is_alone(offset, self.g.cluster_size(), uses.total) {
                self.repair_l2(offset)?;
            } else {
                doomed.push(offset);
            }
        }
        Ok(doomed)
    }

    fn repair_l2(&mut self, offset: HostOffset) -> Result<()> {
        let mut table = vec![0; self.g.cluster_size() as usize];
        self.read(&mut table, offset)?;
        let bounds = self.bounds();
        for at in (0..table.len()).step_by(self.g.l2_entry_size() as usize) {
            let entry = L2Entry::parse(&table, at, &self.g);
            if entry == L2Entry::default() {
                continue;
            }
            let found = bounds.inspect_l2(entry);
            for problem in &found.problems {
                self.repairing(problem);
            }
            if !found.problems.is_empty() {
                found.repaired.encode(&mut table, at, &self.g);
                let end = at + self.g.l2_entry_size() as usize;
                self.write(&table[at..end], offset + at as u64)?;
            }
        }
        Ok(())
    }

    /// Repairs entries of all L1 tables that are invalid or refer to one of the `doomed` L2 tables.
    fn repair_l1_tables(&mut self, doomed: &[HostOffset]) -> Result<()> {
        let mut tables = vec![(self.header.l1_offset, self.header.l1_entries)];
        for snapshot in &self.snapshots {
            if self.snapshot_problem(snapshot).is_none() {
                tables.push((snapshot.l1_offset, snapshot.l1_entries));
            }
        }
        let active = self.header.l1_offset;
        let bounds = self.bounds();
        for (offset, entries) in tables {
            let bytes = u64::from(entries) * L1Entry::SIZE;
            // The active L1 table is repaired even if something else refers to its clusters.
            if offset != active && !self.is_alone(offset, bytes, 1) {
                continue;
            }
            self.for_each_word(offset, bytes, |pass, at, word| {
                let mut found = bounds.inspect_l1(L1Entry(word));
                let table = L1Entry(word).raw_offset();
                if doomed.binary_search(&table).is_ok() {
                    let text = format!("L2 table offset={table:#x} is broken, and something else");
                    found.problems.push(text);
                    found.repaired = L1Entry(0);
                }
                for problem in &found.problems {
                    pass.repairing(problem);
                }
                if !found.problems.is_empty() {
                    pass.write(&found.repaired.0.to_be_bytes(), at)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Completes incomplete snapshot entries, and replaces unusable L1 tables of snapshots with
    /// empty ones. The new snapshot table is written to the end of the file before the header
    /// refers to it.
    fn repair_snapshot_table(&mut self) -> Result<()> {
        let before = self.report.corruptions_fixed;
        let (offset, len) = (
            self.header.snapshots_offset,
            snapshot_table_bytes(&self.snapshots),
        );
        if len > 0 && !self.in_file(offset, len) {
            self.repairing("snapshot table, which is beyond the end of the file");
        }
        let mut snapshots = std::mem::take(&mut self.snapshots);
        for snapshot in &mut snapshots {
            let shown = snapshot.shown();
            if self.is_incomplete(snapshot) {
                self.repairing(&format!("snapshot {shown}: its entry is incomplete"));
                let (state, disk) = (snapshot.vm_state_size(), self.header.size);
                let known = snapshot.extra.len() / 8 * 8;
                snapshot.extra.truncate(known);
                for number in [state, disk].iter().skip(known / 8) {
                    snapshot.extra.extend(number.to_be_bytes());
                }
            }
            if let Some(problem) = self.snapshot_loss(snapshot) {
                self.repairing(&format!("snapshot {shown}: {problem}"));
                (snapshot.l1_offset, snapshot.l1_entries) = (HostOffset(0), 0);
            }
        }
        // Entries of zeroes are those that the end of the file has cut off.
        snapshots.retain(|s| s.l1_entries != 0 || !s.id.is_empty() || !s.name.is_empty());
        self.snapshots = snapshots;
        if self.report.corruptions_fixed == before {
            return Ok(());
        }
        let mut table = Vec::new();
        for snapshot in &self.snapshots {
            snapshot.encode(&mut table);
        }
        let at = self.end();
        table.resize(
            table.len().next_multiple_of(self.g.cluster_size() as usize),
            0,
        );
        self.write(&table, at)?;
        self.sync()?;
        self.header.snapshots = self.snapshots.len() as u32;
        self.header.snapshots_offset = at;
        let mut switch = [0; 12];
        switch[..4].copy_from_slice(&self.header.snapshots.to_be_bytes());
        switch[4..].copy_from_slice(&at.0.to_be_bytes());
        self.write(&switch, HostOffset(60))?;
        self.sync()
    }

    /// Returns why a snapshot's L1 table must be dropped, or `None` if the table can be kept.
    fn snapshot_loss(&self, snapshot: &Snapshot) -> Option<&'static str> {
        let (offset, entries) = (snapshot.l1_offset, snapshot.l1_entries);
        let bytes = u64::from(entries) * L1Entry::SIZE;
        self.snapshot_problem(snapshot).or_else(|| {
            let stays_broken = self.broken_l1.contains(&offset) && !self.is_alone(offset, bytes, 1);
            stays_broken.then_some("its L1 table is broken, and something else")
        })
    }

    /// Repairs bitmap tables. Bits that cannot be read are all set to 1, so that no change is
    /// missed.
    fn repair_bitmaps(&mut self) -> Result<()> {
        let bitmaps = std::mem::take(&mut self.bitmaps);
        for bitmap in &bitmaps {
            let bytes = u64::from(bitmap.table_entries) * 8;
            let offset = bitmap.table_offset;
            if !self.in_file(offset, bytes) || !self.is_alone(offset, bytes, 1) {
                continue;
            }
            self.for_each_word(offset, bytes, |pass, at, word| {
                if let Err(problem) = pass.bitmap_cluster(word) {
                    pass.repairing(&problem);
                    pass.write(&TableEntry::ALL_ONES.0.to_be_bytes(), at)?;
                }
                Ok(())
            })?;
        }
        self.bitmaps = bitmaps;
        Ok(())
    }
}
