//! Adapts bitmaps to a new disk size.

use super::{Bitmaps, MAX_BITS, bits, check_usable};
use crate::offline::edit::Editor;
use crate::offline::info::read_bitmaps;
use crate::qcow2::bitmap::TableEntry;
use crate::{Error, Result};

impl<'a> Bitmaps<'a> {
    /// Opens the bitmaps of an image that is being changed already. The editor's pending changes
    /// are committed together with those of the bitmaps.
    pub(crate) fn of(editor: Editor<'a>) -> Result<Bitmaps<'a>> {
        let bitmaps = read_bitmaps(editor.file(), editor.header())?;
        let bitmaps = bitmaps.into_iter().map(Into::into).collect();
        Ok(Bitmaps { editor, bitmaps })
    }

    /// Resizes all bitmaps from a disk of `old` bytes to one of `new` bytes. Bits of the new part
    /// are clean. Fails if a bitmap is not usable, because its contents would still be invalid
    /// afterwards.
    pub(crate) fn resize(&mut self, old: u64, new: u64) -> Result<()> {
        (0..self.bitmaps.len()).try_for_each(|index| self.resize_one(index, old.min(new), new))
    }

    /// Resizes one bitmap, and keeps the bits of the first `kept` bytes.
    fn resize_one(&mut self, index: usize, kept: u64, new: u64) -> Result<()> {
        let g = self.editor.geometry();
        let bitmap = &self.bitmaps[index].bitmap;
        check_usable(bitmap)?;
        let granularity = bitmap.granularity();
        if new.div_ceil(granularity) > MAX_BITS {
            let name = bits::printable(&bitmap.name);
            return Err(Error::unsupported(format!(
                "bitmap '{name}': would exceed {MAX_BITS} bits; remove it first"
            )));
        }
        let entries = g.clusters_of(bitmap.bytes_for(new));
        let mut table = self.take_table(index)?;
        let (kept, per_cluster) = (kept.div_ceil(granularity), g.cluster_size() * 8);
        let stay = kept.div_ceil(per_cluster) as usize;
        if table.len() < stay {
            let name = bits::printable(&self.bitmaps[index].bitmap.name);
            return Err(Error::invalid(format!(
                "bitmap '{name}': its table is too short for the disk; remove it first"
            )));
        }
        for entry in table.drain(stay.min(table.len())..) {
            self.release(entry)?;
        }
        if let Some(last) = table.last_mut()
            && stay as u64 * per_cluster > kept
        {
            let within = kept % per_cluster;
            *last = self.clean_from(*last, within)?;
        }
        self.check_memory(entries)?;
        table.resize(entries as usize, TableEntry(0));
        self.bitmaps[index].bitmap.table_entries = entries as u32;
        self.bitmaps[index].table = Some(table);
        Ok(())
    }

    /// Copies a cluster of bits to a new cluster and clears the bits from `within` on.
    fn clean_from(&mut self, entry: TableEntry, within: u64) -> Result<TableEntry> {
        let g = self.editor.geometry();
        let place = entry.cluster(&g);
        let place = place.map_err(|e| Error::invalid(format!("bitmap table: {e}")))?;
        let mut bytes = match (place, entry) {
            (Some(place), _) => self.editor.read(place, g.cluster_size())?,
            (None, TableEntry::ALL_ONES) => vec![0xff; g.cluster_size() as usize],
            (None, _) => return Ok(entry),
        };
        let byte = (within / 8) as usize;
        bytes[byte] &= (1 << (within % 8)) - 1;
        bytes[byte + 1..].fill(0);
        let clean = self.editor.allocate(1)?;
        self.editor.write(clean, &bytes)?;
        self.release(entry)?;
        Ok(TableEntry(clean.0))
    }
}
