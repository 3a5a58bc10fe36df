//! Marks more blocks dirty: those of another bitmap, or those that are about to be written.

use super::bits::{Cluster, printable};
use super::{Bitmaps, Bits, records};
use crate::qcow2::bitmap::TableEntry;
use crate::{Error, Result};
use std::ops::Range;

/// Calls its second argument for each dirty piece of a range of the disk.
type Dirty<'a> = dyn FnMut(Range<u64>, &mut dyn FnMut(Range<u64>) -> Result<()>) -> Result<()> + 'a;

impl Bitmaps<'_> {
    /// Marks the ranges that an iterator of `written` yields, in order, as dirty in all bitmaps
    /// that record writes. `written` is called once per bitmap.
    pub fn record<I: Iterator<Item = Range<u64>>>(
        &mut self,
        mut written: impl FnMut() -> I,
    ) -> Result<()> {
        for index in 0..self.bitmaps.len() {
            if !records(&self.bitmaps[index].bitmap) {
                continue;
            }
            let mut pieces = written().peekable();
            self.add_bits(index, &mut |range, dirty| {
                while let Some(piece) = pieces.peek().filter(|piece| piece.start < range.end) {
                    let (part, end) = (piece.start.max(range.start), piece.end.min(range.end));
                    if part < end {
                        dirty(part..end)?;
                    }
                    if piece.end > range.end {
                        break;
                    }
                    pieces.next();
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Merges `source` into the bitmap `name`. The granularities may differ. Clusters of bits that
    /// change, or were not stored before, are written to new clusters.
    pub(super) fn merge(&mut self, name: &str, source: &Bits) -> Result<()> {
        let index = self.usable(name)?;
        let target = self.bits(index)?;
        if source.disk_size() != target.disk_size() {
            let (theirs, own) = (source.disk_size(), target.disk_size());
            let name = printable(name.as_bytes());
            return Err(Error::usage(format!(
                "bitmap '{name}' belongs to a disk of {own} bytes; a bitmap of a disk of \
                 {theirs} bytes cannot be merged into it"
            )));
        }
        self.add_bits(index, &mut |range, dirty| source.for_each(range, dirty))
    }

    /// Merges dirty pieces into a bitmap. `source` is called for ranges in ascending order, but not
    /// for all ranges.
    fn add_bits(&mut self, index: usize, source: &mut Dirty) -> Result<()> {
        let target = self.bits(index)?;
        let mut table = self.take_table(index)?;
        for (at, entry) in table.iter_mut().enumerate() {
            if *entry == TableEntry::ALL_ONES {
                continue;
            }
            if let Some(bytes) = merged(&target, at, source)? {
                self.release(*entry)?;
                *entry = self.store_bits(&bytes)?;
            }
        }
        self.bitmaps[index].table = Some(table);
        Ok(())
    }

    fn store_bits(&mut self, bytes: &[u8]) -> Result<TableEntry> {
        if bytes.iter().all(|byte| *byte == 0xff) {
            return Ok(TableEntry::ALL_ONES);
        }
        let place = self.editor.allocate(1)?;
        self.editor.write(place, bytes)?;
        Ok(TableEntry(place.0))
    }
}

/// Returns a cluster of the target's bits merged with those of the source, or `None` if nothing
/// changes.
fn merged(target: &Bits, index: usize, source: &mut Dirty) -> Result<Option<Vec<u8>>> {
    let range = target.range_of(index);
    let (granularity, first) = (target.granularity(), range.start);
    let mut bytes = None;
    let mut changed = false;
    source(range, &mut |dirty| {
        if bytes.is_none() {
            bytes = Some(match target.cluster(index)? {
                Cluster::Mixed(bytes) => bytes,
                Cluster::Zeroes => vec![0; target.cluster_bytes()],
                Cluster::Ones => vec![0xff; target.cluster_bytes()],
            });
        }
        let bits = (dirty.start - first) / granularity..(dirty.end - first).div_ceil(granularity);
        changed |= set(bytes.get_or_insert_default(), bits.start, bits.end);
        Ok(())
    })?;
    Ok(bytes.filter(|_| changed))
}

/// Sets a range of bits. Returns whether any of them was not set before.
fn set(bytes: &mut [u8], mut bit: u64, end: u64) -> bool {
    let mut changed = false;
    while bit < end {
        let (byte, from) = (&mut bytes[(bit / 8) as usize], bit % 8);
        let n = (8 - from).min(end - bit);
        let mask = (0xff_u8 >> (8 - n)) << from;
        changed |= *byte & mask != mask;
        *byte |= mask;
        bit += n;
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_set_across_bytes() {
        let mut bytes = [0; 4];
        assert!(set(&mut bytes, 3, 20));
        assert_eq!(bytes, [0xf8, 0xff, 0x0f, 0]);
        assert!(!set(&mut bytes, 4, 20));
        assert!(set(&mut bytes, 31, 32));
        assert_eq!(bytes[3], 0x80);
        assert!(!set(&mut bytes, 5, 5));
    }
}
