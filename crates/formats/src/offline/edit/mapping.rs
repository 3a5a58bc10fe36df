//! An L1 table and the L2 tables below it, of the disk or of a snapshot.

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

/// Where guest clusters are. It is in memory until [`Mapping::store`]; L2 tables that change go to
/// new places at once.
pub(crate) struct Mapping {
    l1: Vec<L1Entry>,
    open: Option<Open>,
}

/// The bytes of the file that an entry refers to, and whose refcounts count that.
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

/// Calls `change` with each entry of an L2 table that says something; whether any has changed.
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
    /// Reads an L1 table, whose place and size were checked.
    pub(crate) fn read(editor: &Editor, offset: HostOffset, entries: u32) -> Result<Mapping> {
        let bytes = editor.read(offset, u64::from(entries) * L1Entry::SIZE)?;
        let words = bytes.chunks_exact(8);
        let entry = |w: &[u8]| L1Entry(u64::from_be_bytes(w.try_into().unwrap_or_default()));
        Ok(Mapping {
            l1: words.map(entry).collect(),
            open: None,
        })
    }

    /// The disk's.
    pub(crate) fn active(editor: &Editor) -> Result<Mapping> {
        let header = editor.header();
        Mapping::read(editor, header.l1_offset, header.l1_entries)
    }

    /// Entries of the L1 table.
    pub(crate) fn l1_entries(&self) -> u64 {
        self.l1.len() as u64
    }

    /// Makes the L1 table longer. It never makes it shorter.
    pub(crate) fn grow(&mut self, entries: u64) {
        if entries > self.l1_entries() {
            self.l1.resize(entries as usize, L1Entry::default());
        }
    }

    fn table(&self, index: usize, g: &Geometry) -> Result<Option<HostOffset>> {
        let table = self.l1.get(index).copied().unwrap_or_default().l2_table(g);
        table.map_err(|e| Error::invalid(format!("L1 table: {e}")))
    }

    /// What the tables say that were not `seen` yet, cluster by cluster, as far as that is something.
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

    /// Counts one more reference to each L2 table and each cluster.
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

    /// Counts one reference less.
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

    /// Makes the copied flags say what the refcounts say, for the `tables` L1 tables that are going
    /// to be stored from this one. L2 tables that change go to new places for these, and stay
    /// where they are for all others.
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

    /// Puts the L1 table into clusters of its own, which are returned.
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

    /// Puts the L1 table into new clusters and makes it the disk's.
    pub(crate) fn store_active(&mut self, editor: &mut Editor) -> Result<()> {
        let (old, entries) = (editor.header().l1_offset, editor.header().l1_entries);
        let place = self.store(editor)?;
        editor.release(old, u64::from(entries) * L1Entry::SIZE)?;
        let header = editor.header_mut();
        (header.l1_offset, header.l1_entries) = (place, self.l1.len() as u32);
        Ok(())
    }

    /// Forgets everything from a guest cluster on, and the L1 entries that it leaves over.
    pub(crate) fn cut(&mut self, editor: &mut Editor, cluster: u64) -> Result<()> {
        self.close(editor)?;
        let g = editor.geometry();
        let keep = cluster.div_ceil(g.l2_entries());
        for index in keep as usize..self.l1.len() {
            self.release_table(editor, &g, index)?;
        }
        self.l1.truncate(keep as usize);
        // The rest of the last table that stays.
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

    /// What is known of a guest cluster.
    pub(crate) fn get(&mut self, editor: &mut Editor, cluster: u64) -> Result<L2Entry> {
        let g = editor.geometry();
        let (index, at) = place_of(cluster, &g);
        self.open(editor, index)?;
        let open = self.open.as_ref();
        Ok(open.map_or_else(L2Entry::default, |o| L2Entry::parse(&o.bytes, at, &g)))
    }

    /// Changes what is known of a guest cluster, in the L1 table as long as it is. The old entry's
    /// clusters lose a reference; those of the new one have theirs already.
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

    /// Puts the L2 table that was changed in a new place.
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

/// The index in the L1 table, and the byte in the L2 table.
fn place_of(cluster: u64, g: &Geometry) -> (usize, usize) {
    let entry = cluster & (g.l2_entries() - 1);
    let index = cluster >> g.l2_bits();
    (index as usize, (entry * g.l2_entry_size()) as usize)
}

/// Puts a table that `tables` L1 tables refer to in a new place. What it refers to has as many
/// references as before.
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
