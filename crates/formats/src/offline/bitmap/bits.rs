//! The contents of a bitmap.

use crate::qcow2::bitmap::{Bitmap, TableEntry};
use crate::qcow2::{Geometry, Header};
use crate::{Error, Result};
use fathom_files::{ImageFile, read_up_to};
use std::ops::Range;

/// The bits of one bitmap, read on demand. Bit n, counted from the least significant bit of the
/// first byte, covers the n-th granule of the disk.
pub struct Bits<'a> {
    file: &'a dyn ImageFile,
    g: Geometry,
    granularity: u64,
    /// Size of the disk in bytes.
    size: u64,
    table: Vec<TableEntry>,
}

/// The contents of a cluster of bits.
pub(super) enum Cluster {
    Zeroes,
    Ones,
    Mixed(Vec<u8>),
}

impl<'a> Bits<'a> {
    /// Opens a bitmap on disk that [may be used](super::check_usable).
    pub fn read(file: &'a dyn ImageFile, header: &Header, bitmap: &Bitmap) -> Result<Bits<'a>> {
        super::check_usable(bitmap)?;
        let g = header.geometry();
        let bytes = bitmap.bytes_for(header.size & !511);
        let there = u64::from(bitmap.table_entries) * g.cluster_size();
        if there < bytes {
            let name = printable(&bitmap.name);
            return Err(Error::invalid(format!(
                "bitmap '{name}' has {there} bytes of bits, but its disk needs {bytes}"
            )));
        }
        let table = read_table(file, &g, bitmap)?;
        Ok(Bits::new(file, header, bitmap, table))
    }

    /// Opens a bitmap that has this table.
    pub(super) fn new(
        file: &'a dyn ImageFile,
        header: &Header,
        bitmap: &Bitmap,
        table: Vec<TableEntry>,
    ) -> Bits<'a> {
        Bits {
            file,
            g: header.geometry(),
            granularity: bitmap.granularity(),
            size: header.size & !511,
            table,
        }
    }

    /// Size of the disk in bytes.
    pub fn disk_size(&self) -> u64 {
        self.size
    }

    /// Number of bytes of the disk that a bit covers.
    pub fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Size of a cluster of bits in bytes.
    pub(super) fn cluster_bytes(&self) -> usize {
        self.g.cluster_size() as usize
    }

    /// Number of bytes of the disk that one cluster of bits covers.
    fn reach(&self) -> u64 {
        // At most 2^21 * 8 * 2^31.
        self.g.cluster_size() * 8 * self.granularity
    }

    /// Returns the range of the disk that a cluster of bits covers.
    pub(super) fn range_of(&self, index: usize) -> Range<u64> {
        let reach = self.reach();
        let start = (index as u64).saturating_mul(reach).min(self.size);
        start..start.saturating_add(reach).min(self.size)
    }

    pub(super) fn cluster(&self, index: usize) -> Result<Cluster> {
        let entry = self.table[index];
        let place = entry.cluster(&self.g);
        let place = place.map_err(|e| Error::invalid(format!("bitmap table: {e}")))?;
        let Some(place) = place else {
            return Ok(match entry {
                TableEntry::ALL_ONES => Cluster::Ones,
                _ => Cluster::Zeroes,
            });
        };
        let mut bytes = vec![0; self.g.cluster_size() as usize];
        self.file
            .read_at(&mut bytes, place.0)
            .map_err(Error::io("cannot read a bitmap"))?;
        Ok(Cluster::Mixed(bytes))
    }

    /// Calls `dirty` for each dirty piece of `range`, in order. Adjacent pieces may be reported
    /// together or separately.
    pub fn for_each(
        &self,
        range: Range<u64>,
        dirty: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let end = range.end.min(self.size);
        let mut index = (range.start / self.reach()) as usize;
        while self.range_of(index).start < end && index < self.table.len() {
            let of = self.range_of(index);
            let part = range.start.max(of.start)..end.min(of.end);
            match self.cluster(index)? {
                Cluster::Zeroes => {}
                Cluster::Ones => dirty(part)?,
                Cluster::Mixed(bytes) => {
                    for bits in runs(&bytes) {
                        let start = of.start + bits.start * self.granularity;
                        let stop = of.start + bits.end * self.granularity;
                        let (start, stop) = (start.max(part.start), stop.min(part.end));
                        if start < stop {
                            dirty(start..stop)?;
                        }
                    }
                }
            }
            index += 1;
        }
        Ok(())
    }

    /// Returns all bits as words, starting with the lowest bit of the first word.
    pub(crate) fn words(&self) -> Result<Vec<u64>> {
        let count = self.size.div_ceil(self.granularity).div_ceil(64) as usize;
        let mut words = Vec::with_capacity(count);
        let per_cluster = self.cluster_bytes() / 8;
        for index in 0..self.table.len() {
            match self.cluster(index)? {
                Cluster::Zeroes => words.extend(std::iter::repeat_n(0, per_cluster)),
                Cluster::Ones => words.extend(std::iter::repeat_n(u64::MAX, per_cluster)),
                Cluster::Mixed(bytes) => {
                    let of = bytes.as_chunks::<8>().0.iter();
                    words.extend(of.map(|word| u64::from_le_bytes(*word)));
                }
            }
            // The table may cover more than the disk.
            if words.len() >= count {
                break;
            }
        }
        words.resize(count, 0);
        let rest = self.size.div_ceil(self.granularity) % 64;
        if let Some(last) = words.last_mut().filter(|_| rest > 0) {
            *last &= u64::MAX >> (64 - rest);
        }
        Ok(words)
    }

    /// Number of dirty bytes of the disk.
    pub fn count(&self) -> Result<u64> {
        let mut count = 0;
        self.for_each(0..self.size, &mut |dirty| {
            count += dirty.end - dirty.start;
            Ok(())
        })?;
        Ok(count)
    }
}

/// Returns the runs of bits that are 1.
fn runs(bytes: &[u8]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (at, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
        let (base, mut word) = (at as u64 * 64, u64::from_le_bytes(*word));
        let mut done = 0;
        while word != 0 {
            let zeroes = word.trailing_zeros();
            let ones = (word >> zeroes).trailing_ones();
            let start = base + u64::from(done + zeroes);
            let end = start + u64::from(ones);
            match runs.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => runs.push(start..end),
            }
            done += zeroes + ones;
            word = word.checked_shr(zeroes + ones).unwrap_or(0);
        }
    }
    runs
}

/// Refuses a table of more bits than a bitmap can have, and tables that do not fit into the file
/// without overlapping. This bounds the work of reading them by the file's length.
pub(crate) fn check_tables<'b>(
    file: &dyn ImageFile,
    g: &Geometry,
    bitmaps: impl Iterator<Item = &'b Bitmap>,
) -> Result<()> {
    let file_len = file.len().map_err(Error::io("cannot read its size"))?;
    let mut room = file_len;
    for bitmap in bitmaps {
        check_table_size(g, bitmap)?;
        let len = u64::from(bitmap.table_entries) * 8;
        // Parts of a table beyond the end of the file are zeroes, which are not read.
        let there = len.min(file_len.saturating_sub(bitmap.table_offset.0));
        room = room
            .checked_sub(there)
            .ok_or_else(|| Error::invalid("the tables of its bitmaps overlap"))?;
    }
    Ok(())
}

fn check_table_size(g: &Geometry, bitmap: &Bitmap) -> Result<()> {
    if bitmap.has_bits_of_a_size(g) {
        return Ok(());
    }
    let (name, entries) = (printable(&bitmap.name), bitmap.table_entries);
    Err(Error::invalid(format!(
        "bitmap '{name}' has a table of {entries} entries, which exceeds the limit"
    )))
}

/// Reads the table of a bitmap. Fails if the table is not in the file completely.
pub(crate) fn read_table(
    file: &dyn ImageFile,
    g: &Geometry,
    bitmap: &Bitmap,
) -> Result<Vec<TableEntry>> {
    check_table_size(g, bitmap)?;
    let len = u64::from(bitmap.table_entries) * 8;
    let bytes = read_up_to(file, bitmap.table_offset.0, len)
        .map_err(Error::io("cannot read a bitmap's table"))?;
    if (bytes.len() as u64) < len {
        let name = printable(&bitmap.name);
        return Err(Error::invalid(format!(
            "bitmap '{name}' has a table beyond the file's end"
        )));
    }
    let words = bytes.as_chunks::<8>().0.iter();
    Ok(words
        .map(|word| TableEntry(u64::from_be_bytes(*word)))
        .collect())
}

/// Makes a bitmap's name printable for messages.
pub(super) fn printable(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cross_words() {
        let mut bytes = [0; 32];
        assert_eq!(runs(&bytes), []);
        for bit in [0, 5, 6, 62, 63, 64, 130, 255] {
            bytes[bit / 8] |= 1 << (bit % 8);
        }
        let found: Vec<_> = runs(&bytes).iter().map(|r| (r.start, r.end)).collect();
        assert_eq!(found, [(0, 1), (5, 7), (62, 65), (130, 131), (255, 256)]);
        let all = runs(&[0xff; 16]);
        assert_eq!((all.len(), all[0].end), (1, 128));
    }
}
