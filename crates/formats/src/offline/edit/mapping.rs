//! An L1 table and its L2 tables, of the disk or of a snapshot.

use super::Editor;
use crate::qcow2::{Cluster, Geometry, L1Entry, L2Entry};
use crate::{Error, HostOffset, Result};
use std::collections::HashSet;

/// An L2 table that is being changed.
struct Open {
    index: usize,
    bytes: Vec<u8>,
    changed: bool,
}

/// The mapping of guest clusters. The L1 table is in memory until [`Mapping::store`]. A changed L2
/// table is written to new clusters as soon as another table is opened.
pub(crate) struct Mapping {
    l1: Vec<L1Entry>,
    open: Option<Open>,
}

/// Returns the bytes of the image that an entry refers to and that are counted in refcounts.
fn target(entry: L2Entry, g: &Geometry) -> Option<(HostOffset, u64)> {
    if entry.is_compressed() {
        let range = entry.compressed_range(g);
        Some((range.offset, range.len))
    } else if g.data_file || entry.raw_offset().0 == 0 {
        None
    } else {
        Some((entry.raw_offset(), g.cluster_size()))
    }
}

/// Calls `change` for each entry of an L2 table that is not empty. Returns whether any entry
/// changed.
fn change_entries(
    bytes: &mut [u8],
    g: &Geometry,
    mut change: impl FnMut(L2Entry) -> Result<L2Entry>,
) -> Result<bool> {
    let mut changed = false;
    for at in (0..bytes.len()).step_by(g.l2_entry_size() as usize) {
        let old = L2Entry::parse(bytes, at, g);
        if old == L2Entry::default() {
            continue;
        }
        let new = change(old)?;
        if new != old {
            new.encode(bytes, at, g);
            changed = true;
        }
    }
    Ok(changed)
}

impl Mapping {
    /// Reads an L1 table, whose offset and size have been validated.
    pub(crate) fn read(editor: &Editor, offset: HostOffset, entries: u32) -> Result<Mapping> {
        let bytes = editor.read(offset, u64::from(entries) * L1Entry::SIZE)?;
        let words = bytes.chunks_exact(8);
        let entry = |w: &[u8]| L1Entry(u64::from_be_bytes(w.try_into().unwrap_or_default()));
        Ok(Mapping {
            l1: words.map(entry).collect(),
            open: None,
        })
    }

    /// Reads the active L1 table.
    pub(crate) fn active(editor: &Editor) -> Result<Mapping> {
        let header = editor.header();
        Mapping::read(editor, header.l1_offset, header.l1_entries)
    }

    /// Number of entries of the L1 table.
    pub(crate) fn l1_entries(&self) -> u64 {
        self.l1.len() as u64
    }

    /// Extends the L1 table to `entries` entries. Never shortens the table.
    pub(crate) fn grow(&mut self, entries: u64) {
        if entries > self.l1_entries() {
            self.l1.resize(entries as usize, L1Entry::default());
        }
    }

    fn table(&self, index: usize, g: &Geometry) -> Result<Option<HostOffset>> {
        let table = self.l1.get(index).copied().unwrap_or_default().l2_table(g);
        table.map_err(|e| Error::invalid(format!("L1 table: {e}")))
    }

    /// Calls `look` for each cluster that is not empty, in all L2 tables that are not in `seen`
    /// yet. Adds these tables to `seen`.
    pub(crate) fn each(
        &self,
        editor: &Editor,
        seen: &mut HashSet<HostOffset>,
        look: &mut dyn FnMut(Cluster),
    ) -> Result<()> {
        let g = editor.geometry();
        for index in 0..self.l1.len() {
            let Some(table) = self.table(index, &g)? else {
                continue;
            };
            if !seen.insert(table) {
                continue;
            }
            change_entries(&mut editor.read(table, g.cluster_size())?, &g, |entry| {
                let cluster = entry.decode(&g);
                look(cluster.map_err(|e| Error::invalid(format!("L2 table: {e}")))?);
                Ok(entry)
            })?;
        }
        Ok(())
    }

    /// Adds one reference to each L2 table and each cluster.
    pub(crate) fn reference(&self, editor: &mut Editor) -> Result<()> {
        let g = editor.geometry();
        for index in 0..self.l1.len() {
            let Some(table) = self.table(index, &g)? else {
                continue;
            };
            change_entries(&mut editor.read(table, g.cluster_size())?, &g, |entry| {
                if let Some((offset, len)) = target(entry, &g) {
                    editor.reference(offset, len)?;
                }
                Ok(entry)
            })?;
            editor.reference(table, g.cluster_size())?;
        }
        Ok(())
    }

    /// Removes one reference from each L2 table and each cluster.
    pub(crate) fn release(&self, editor: &mut Editor) -> Result<()> {
        let g = editor.geometry();
        (0..self.l1.len()).try_for_each(|index| self.release_table(editor, &g, index))
    }

    fn release_table(&self, editor: &mut Editor, g: &Geometry, index: usize) -> Result<()> {
        let Some(table) = self.table(index, g)? else {
            return Ok(());
        };
        change_entries(&mut editor.read(table, g.cluster_size())?, g, |entry| {
            if let Some((offset, len)) = target(entry, g) {
                editor.release(offset, len)?;
            }
            Ok(entry)
        })?;
        editor.release(table, g.cluster_size())
    }

    /// Updates the copied flags according to the refcounts. `tables` is the number of L1 tables
    /// that will be stored from this mapping. A changed L2 table gets a new place for these L1
    /// tables. All other L1 tables still refer to the old place.
    pub(crate) fn set_flags(&mut self, editor: &mut Editor, tables: u64) -> Result<()> {
        let g = editor.geometry();
        for index in 0..self.l1.len() {
            let Some(mut table) = self.table(index, &g)? else {
                continue;
            };
            let mut bytes = editor.read(table, g.cluster_size())?;
            let changed = change_entries(&mut bytes, &g, |entry| {
                if entry.is_compressed() || entry.raw_offset().0 == 0 {
                    return Ok(entry);
                }
                let single = editor.refcount(entry.raw_offset())? == 1;
                Ok(entry.with_copied(single))
            })?;
            if changed {
                table = move_table(editor, table, &bytes, tables)?;
            }
            let single = editor.refcount(table)? == 1;
            self.l1[index] = L1Entry::new(table, single);
        }
        Ok(())
    }

    /// Writes the L1 table to newly allocated clusters. Returns their offset.
    pub(crate) fn store(&mut self, editor: &mut Editor) -> Result<HostOffset> {
        self.close(editor)?;
        let g = editor.geometry();
        let clusters = g.clusters_of(self.l1_entries() * L1Entry::SIZE);
        if clusters == 0 {
            return Ok(HostOffset(0));
        }
        let mut bytes: Vec<u8> = self.l1.iter().flat_map(|e| e.0.to_be_bytes()).collect();
        bytes.resize((clusters << g.cluster_bits) as usize, 0);
        let place = editor.allocate(clusters)?;
        editor.write(place, &bytes)?;
        Ok(place)
    }

    /// Writes the L1 table to newly allocated clusters and makes it the active L1 table.
    pub(crate) fn store_active(&mut self, editor: &mut Editor) -> Result<()> {
        let (old, entries) = (editor.header().l1_offset, editor.header().l1_entries);
        let place = self.store(editor)?;
        editor.release(old, u64::from(entries) * L1Entry::SIZE)?;
        let header = editor.header_mut();
        (header.l1_offset, header.l1_entries) = (place, self.l1.len() as u32);
        Ok(())
    }

    /// Unmaps all guest clusters from number `cluster` on, and removes the L1 entries that are no
    /// longer needed.
    pub(crate) fn cut(&mut self, editor: &mut Editor, cluster: u64) -> Result<()> {
        self.close(editor)?;
        let g = editor.geometry();
        let keep = cluster.div_ceil(g.l2_entries());
        for index in keep as usize..self.l1.len() {
            self.release_table(editor, &g, index)?;
        }
        self.l1.truncate(keep as usize);
        // The remaining entries of the last L2 table that stays.
        let rest = cluster..keep << g.l2_bits();
        if self.l1_entries() < keep || rest.is_empty() {
            return Ok(());
        }
        if self.table(keep as usize - 1, &g)?.is_some() {
            for cluster in rest {
                self.set(editor, cluster, L2Entry::default())?;
            }
        }
        self.close(editor)
    }

    /// Returns the L2 entry of a guest cluster.
    pub(crate) fn get(&mut self, editor: &mut Editor, cluster: u64) -> Result<L2Entry> {
        let g = editor.geometry();
        let (index, at) = place_of(cluster, &g);
        self.open(editor, index)?;
        let open = self.open.as_ref();
        Ok(open.map_or_else(L2Entry::default, |o| L2Entry::parse(&o.bytes, at, &g)))
    }

    /// Sets the L2 entry of a guest cluster, which the L1 table must cover. The clusters of the old
    /// entry lose a reference. The clusters of the new entry must have their references already.
    pub(crate) fn set(&mut self, editor: &mut Editor, cluster: u64, entry: L2Entry) -> Result<()> {
        let g = editor.geometry();
        let (index, at) = place_of(cluster, &g);
        let old = self.get(editor, cluster)?;
        if old == entry {
            return Ok(());
        }
        if let Some((offset, len)) = target(old, &g) {
            editor.release(offset, len)?;
        }
        let open = self.open.get_or_insert_with(|| Open {
            index,
            bytes: vec![0; g.cluster_size() as usize],
            changed: true,
        });
        entry.encode(&mut open.bytes, at, &g);
        open.changed = true;
        Ok(())
    }

    /// Reads the L2 table at an index of the L1 table, if there is one.
    fn open(&mut self, editor: &mut Editor, index: usize) -> Result<()> {
        if self.open.as_ref().is_some_and(|open| open.index == index) {
            return Ok(());
        }
        self.close(editor)?;
        let g = editor.geometry();
        if let Some(table) = self.table(index, &g)? {
            self.open = Some(Open {
                index,
                bytes: editor.read(table, g.cluster_size())?,
                changed: false,
            });
        }
        Ok(())
    }

    /// Writes the open L2 table to a new place if the table has changed.
    fn close(&mut self, editor: &mut Editor) -> Result<()> {
        let Some(open) = self.open.take().filter(|open| open.changed) else {
            return Ok(());
        };
        let old = self.table(open.index, &editor.geometry())?;
        let place = match old {
            Some(old) => move_table(editor, old, &open.bytes, 1)?,
            None => {
                let place = editor.allocate(1)?;
                editor.write(place, &open.bytes)?;
                place
            }
        };
        self.l1[open.index] = L1Entry::new(place, true);
        Ok(())
    }
}

/// Returns the index in the L1 table and the byte offset in the L2 table.
fn place_of(cluster: u64, g: &Geometry) -> (usize, usize) {
    let entry = cluster & (g.l2_entries() - 1);
    let index = cluster >> g.l2_bits();
    (index as usize, (entry * g.l2_entry_size()) as usize)
}

/// Moves an L2 table that `tables` L1 tables refer to. The refcounts of the clusters that the table
/// refers to do not change.
fn move_table(
    editor: &mut Editor,
    old: HostOffset,
    bytes: &[u8],
    tables: u64,
) -> Result<HostOffset> {
    let place = editor.allocate(1)?;
    editor.write(place, bytes)?;
    for _ in 1..tables {
        editor.reference(place, 1)?;
    }
    for _ in 0..tables {
        editor.release(old, 1)?;
    }
    Ok(place)
}
