//! Counts the references of L1 and L2 tables, snapshots and bitmaps.

use super::Pass;
use super::entries::Bounds;
use crate::offline::info::snapshot_table_bytes;
use crate::qcow2::bitmap::TableEntry;
use crate::qcow2::snapshot::{LEAST_EXTRA_V3, Snapshot};
use crate::qcow2::{L1Entry, L2Entry, MAX_L1_BYTES};
use crate::{HostOffset, Result};

/// Number of bytes of a table that are read at once.
const CHUNK: u64 = 64 << 10;

impl Pass<'_, '_> {
    pub(super) fn bounds(&self) -> Bounds {
        Bounds {
            g: self.g,
            file_len: self.file_len,
        }
    }

    /// Counts all references except those of the refcount structures.
    pub(super) fn count_structure(&mut self) -> Result<()> {
        // The header's cluster.
        self.counts.add(0, 1);
        if let Some(crypto) = self.header.encryption()? {
            self.count_region("encryption header", crypto.offset, crypto.len);
        }
        let (offset, entries) = (self.header.l1_offset, self.header.l1_entries);
        self.count_l1(offset, entries, true)?;
        self.count_snapshots()?;
        let tables: Vec<HostOffset> = self.tables.keys().copied().collect();
        for offset in tables {
            self.count_l2(offset)?;
        }
        self.count_bitmaps()
    }

    /// Calls `visit` with the place and value of each nonzero number in a table of big-endian
    /// 64-bit numbers. Numbers beyond the end of the file are 0.
    pub(super) fn for_each_word(
        &mut self,
        offset: HostOffset,
        bytes: u64,
        mut visit: impl FnMut(&mut Self, HostOffset, u64) -> Result<()>,
    ) -> Result<()> {
        let there = self.file_len.saturating_sub(offset.0).min(bytes);
        // The end of the file may cut off part of a number.
        let end = offset + there.next_multiple_of(8).min(bytes);
        let mut at = offset;
        let mut chunk = vec![0; CHUNK.min(end - offset) as usize];
        while at < end {
            let piece = &mut chunk[..CHUNK.min(end - at) as usize];
            self.read(piece, at)?;
            for (i, word) in piece.chunks_exact(8).enumerate() {
                let value = u64::from_be_bytes(word.try_into().unwrap_or_default());
                if value != 0 {
                    visit(self, at + i as u64 * 8, value)?;
                }
            }
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Counts a region of metadata. If the file does not contain the region, reports a corruption
    /// and returns false.
    fn count_region(&mut self, what: &str, offset: HostOffset, len: u64) -> bool {
        if len == 0 || self.in_file(offset, len) {
            self.count(offset, len, 1);
            return true;
        }
        self.corruption(&format!(
            "{what} offset={offset:#x} size={len:#x} is beyond the end of the file"
        ));
        false
    }

    fn count_l1(&mut self, offset: HostOffset, entries: u32, active: bool) -> Result<()> {
        let bytes = u64::from(entries) * L1Entry::SIZE;
        let what = if active {
            "L1 table"
        } else {
            "snapshot's L1 table"
        };
        self.count_region(what, offset, bytes);
        let bounds = self.bounds();
        self.for_each_word(offset, bytes, |pass, _, word| {
            let found = bounds.inspect_l1(L1Entry(word));
            for problem in &found.problems {
                pass.corruption(problem);
            }
            if !active && !found.problems.is_empty() {
                pass.broken_l1.insert(offset);
            }
            if let Some((table, len)) = found.refers_to {
                pass.count(table, len, 1);
                let uses = pass.tables.entry(table).or_default();
                uses.total += 1;
                uses.active += u64::from(active);
            }
            Ok(())
        })
    }

    fn count_l2(&mut self, offset: HostOffset) -> Result<()> {
        let Some(&uses) = self.tables.get(&offset) else {
            return Ok(());
        };
        let mut table = vec![0; self.g.cluster_size() as usize];
        self.read(&mut table, offset)?;
        let bounds = self.bounds();
        let size = self.g.l2_entry_size() as usize;
        let (mut broken, mut expected) = (false, None);
        for at in (0..table.len()).step_by(size) {
            let entry = L2Entry::parse(&table, at, &self.g);
            if entry == L2Entry::default() {
                continue;
            }
            let found = bounds.inspect_l2(entry);
            for problem in &found.problems {
                self.corruption(problem);
            }
            broken |= !found.problems.is_empty();
            if let Some((offset, len)) = found.refers_to {
                self.count(offset, len, uses.total);
            }
            if uses.active > 0 {
                self.count_allocation(entry, &mut expected);
            }
        }
        if let Some(uses) = self.tables.get_mut(&offset) {
            uses.broken = broken;
        }
        Ok(())
    }

    /// Counts allocated and fragmented clusters. `expected` is the host offset at which the table's
    /// next cluster would be contiguous.
    fn count_allocation(&mut self, entry: L2Entry, expected: &mut Option<HostOffset>) {
        let report = &mut self.report;
        if entry.is_compressed() {
            if !self.g.data_file && entry.bitmap == 0 {
                report.allocated_clusters += 1;
                report.compressed_clusters += 1;
                // Compressed clusters count as fragmented: reading one also reads sectors of its
                // neighbours.
                report.fragmented_clusters += 1;
            }
            return;
        }
        let offset = entry.raw_offset();
        if offset.0 != 0 || self.g.data_file && entry.copied() {
            report.allocated_clusters += 1;
            if expected.is_some_and(|expected| expected != offset) {
                report.fragmented_clusters += 1;
            }
            *expected = Some(offset + self.g.cluster_size());
        }
    }

    /// Returns why a snapshot's entry is invalid, or `None` if the entry is valid.
    pub(super) fn snapshot_problem(&self, snapshot: &Snapshot) -> Option<&'static str> {
        let bytes = u64::from(snapshot.l1_entries) * L1Entry::SIZE;
        if !self.g.is_aligned(snapshot.l1_offset) {
            Some("its L1 table is not at a multiple of the cluster size")
        } else if bytes > MAX_L1_BYTES {
            Some("its L1 table is too large")
        } else if bytes > 0 && !self.in_file(snapshot.l1_offset, bytes) {
            Some("its L1 table is beyond the end of the file")
        } else if self.regions.overlap(snapshot.l1_offset, bytes).is_some() {
            Some("its L1 table overlaps other metadata")
        } else {
            None
        }
    }

    /// Whether a snapshot's entry lacks fields that version 3 requires.
    pub(super) fn is_incomplete(&self, snapshot: &Snapshot) -> bool {
        self.header.version >= 3 && snapshot.extra.len() < LEAST_EXTRA_V3
    }

    fn count_snapshots(&mut self) -> Result<()> {
        let snapshots = std::mem::take(&mut self.snapshots);
        if self.g.data_file && !snapshots.is_empty() {
            self.corruption(&format!("{} snapshots with a data file", snapshots.len()));
        }
        let mut room = self.file_len.saturating_add(MAX_L1_BYTES);
        for snapshot in &snapshots {
            if self.is_incomplete(snapshot) {
                let shown = snapshot.shown();
                self.corruption(&format!("snapshot {shown}: its entry is incomplete"));
            }
            if let Some(problem) = self.snapshot_problem(snapshot) {
                let shown = snapshot.shown();
                self.corruption(&format!("snapshot {shown}: {problem}"));
                continue;
            }
            let bytes = u64::from(snapshot.l1_entries) * L1Entry::SIZE;
            let Some(left) = room.checked_sub(bytes) else {
                self.corruption("snapshots' L1 tables overlap");
                break;
            };
            room = left;
            self.count_l1(snapshot.l1_offset, snapshot.l1_entries, false)?;
        }
        let (offset, len) = (
            self.header.snapshots_offset,
            snapshot_table_bytes(&snapshots),
        );
        self.count_region("snapshot table", offset, len);
        self.snapshots = snapshots;
        Ok(())
    }

    fn count_bitmaps(&mut self) -> Result<()> {
        let Some(extension) = self.header.bitmaps().copied() else {
            return Ok(());
        };
        let (offset, len) = (extension.directory_offset, extension.directory_size);
        self.count_region("bitmap directory", offset, len);
        let bitmaps = std::mem::take(&mut self.bitmaps);
        let mut room = self.file_len;
        for bitmap in &bitmaps {
            let bytes = u64::from(bitmap.table_entries) * 8;
            if !self.count_region("bitmap table", bitmap.table_offset, bytes) {
                continue;
            }
            let Some(left) = room.checked_sub(bytes) else {
                self.corruption("bitmap tables overlap");
                break;
            };
            room = left;
            self.for_each_word(bitmap.table_offset, bytes, |pass, _, word| {
                match pass.bitmap_cluster(word) {
                    Err(problem) => pass.corruption(&problem),
                    Ok(Some(offset)) => pass.count(offset, pass.g.cluster_size(), 1),
                    Ok(None) => {}
                }
                Ok(())
            })?;
        }
        self.bitmaps = bitmaps;
        Ok(())
    }

    /// Returns the cluster that a bitmap table's entry refers to, or a description of the problem.
    pub(super) fn bitmap_cluster(
        &self,
        word: u64,
    ) -> std::result::Result<Option<HostOffset>, String> {
        match TableEntry(word).cluster(&self.g) {
            Err(error) => Err(format!("bitmap table: {error}")),
            Ok(Some(offset)) if !self.in_file(offset, self.g.cluster_size()) => Err(format!(
                "bitmap cluster offset={offset:#x} is beyond the end of the file"
            )),
            Ok(offset) => Ok(offset),
        }
    }
}
