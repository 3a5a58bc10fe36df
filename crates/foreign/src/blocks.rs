//! Block tables, which all supported formats use to locate blocks.

use crate::error::{Error, Result};
use crate::grain::{Grain, MARKER};
use crate::limits::MAX_TABLES;
use crate::place::{Extent, Place};
use crate::source::Source;

/// Maximum number of table steps per lookup, which bounds the time of a lookup.
///
/// A step covers one block, or one table without blocks.
const MAX_STEPS: u32 = 4096;

/// The memory in bytes that remains of [`MAX_TABLES`].
pub struct Budget(u64);

impl Budget {
    pub fn new() -> Budget {
        Budget(MAX_TABLES)
    }

    /// Allocates an empty table with capacity for `count` entries.
    pub fn table(&mut self, count: u64) -> Result<Vec<u32>> {
        let bytes = count.checked_mul(size_of::<u32>() as u64);
        self.0 = bytes
            .and_then(|bytes| self.0.checked_sub(bytes))
            .ok_or(Error::TooLarge)?;
        let mut table = Vec::new();
        { table.try_reserve_exact(count as usize) }.map_err(|_| Error::TooLarge)?;
        Ok(table)
    }
}

/// Converts the block numbers in a table to file offsets.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Block size in bytes; not 0.
    pub block: u64,
    /// Size in bytes of the disk that the table covers; the last block may be shorter.
    pub size: u64,
    /// File offset in bytes of the block with the number 1. The number 0 means that there is no
    /// block.
    pub first: u64,
    /// Distance in bytes between the offsets of consecutive block numbers.
    pub unit: u64,
    /// Whether blocks are compressed and, if so, whether a marker precedes each of them.
    pub compressed: Option<Marked>,
}

/// Whether a marker precedes each compressed grain.
pub type Marked = bool;

impl Rule {
    /// Returns the number of blocks.
    pub fn count(&self) -> u64 {
        self.size.div_ceil(self.block)
    }

    /// Checks that block `index` with the number `number` is inside the file, and returns the
    /// number.
    ///
    /// Only the bytes that belong to the guest's disk must be inside the file.
    pub fn check(&self, index: u64, number: u64, source: &Source) -> Result<u32> {
        let Some(before) = number.checked_sub(1) else {
            return Ok(0);
        };
        let at = before
            .checked_mul(self.unit)
            .and_then(|at| at.checked_add(self.first));
        let needed = match self.compressed {
            Some(_) => MARKER as u64 + 1,
            None => self.used(index),
        };
        match (at, u32::try_from(number)) {
            (Some(at), Ok(number)) if source.holds(at, needed) => Ok(number),
            _ => Err(Error::damaged(format!(
                "the block at {} of the disk is outside of its file, which ends at {}",
                index * self.block,
                source.len
            ))),
        }
    }

    /// Returns how many bytes of block `index` belong to the guest's disk.
    pub fn used(&self, index: u64) -> u64 {
        self.block.min(self.size - index * self.block)
    }

    fn place(&self, number: u32) -> u64 {
        self.first + (u64::from(number) - 1) * self.unit
    }
}

/// The locations of all blocks.
#[derive(Debug)]
pub struct Blocks {
    pub rule: Rule,
    /// Number of blocks per table.
    pub per_table: u64,
    /// Position of each table in `numbers`, counted from 1; 0 for a table without blocks.
    ///
    /// Without a directory, there is exactly one table.
    pub directory: Option<Vec<u32>>,
    /// The entries of all tables, checked.
    ///
    /// Each table has `per_table` entries. Only the last one may have fewer.
    pub numbers: Vec<u32>,
    /// Size in bytes of the file that contains the blocks.
    pub file_len: u64,
}

impl Blocks {
    /// Returns the number of block `index`, and how many blocks the step covers.
    ///
    /// A step covers more than one block only if the number is 0.
    fn step(&self, index: u64) -> (u32, u64) {
        let Some(directory) = &self.directory else {
            return (self.numbers[index as usize], 1);
        };
        let (table, entry) = (index / self.per_table, index % self.per_table);
        match directory[table as usize] {
            0 => (0, self.per_table - entry),
            number => {
                let start = u64::from(number - 1) * self.per_table;
                (self.numbers[(start + entry) as usize], 1)
            }
        }
    }

    /// Looks up `offset`, which must be less than the disk size, in the image file number `file`.
    pub fn lookup(&self, offset: u64, len: u64, file: usize) -> Extent {
        let rule = &self.rule;
        let (index, skip) = (offset / rule.block, offset % rule.block);
        let (number, mut blocks) = self.step(index);
        if number != 0 && rule.compressed.is_some() {
            return self.grain(index, number, skip, len, file);
        }
        let rest = rule.size - offset;
        let mut steps = 0;
        let mut found = blocks.saturating_mul(rule.block) - skip;
        while found < len.min(rest) && steps < MAX_STEPS {
            let (next, more) = self.step(index + blocks);
            let follows = match number {
                0 => next == 0,
                _ => next != 0 && rule.place(next) == rule.place(number) + blocks * rule.block,
            };
            if !follows {
                break;
            }
            blocks += more;
            found = blocks.saturating_mul(rule.block) - skip;
            steps += 1;
        }
        let place = match number {
            0 => Place::Zero,
            _ => Place::Data {
                file,
                at: rule.place(number) + skip,
            },
        };
        let len = found.min(len).min(rest);
        Extent { len, place }
    }

    fn grain(&self, index: u64, number: u32, skip: u64, len: u64, file: usize) -> Extent {
        let rule = &self.rule;
        let (at, used) = (rule.place(number), rule.used(index));
        let next = match index + 1 < rule.count() {
            true => self.step(index + 1).0,
            false => 0,
        };
        let end = match next > number {
            true => rule.place(next),
            false => self.file_len,
        };
        let grain = Grain {
            file,
            at,
            len: (end - at).min(2 * rule.block),
            size: rule.block,
            skip,
            used,
            has_marker: rule.compressed == Some(true),
        };
        Extent {
            len: len.min(used - skip),
            place: Place::Compressed(grain),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(numbers: &[u32], size: u64) -> Blocks {
        Blocks {
            rule: Rule {
                block: 1024,
                size,
                first: 512,
                unit: 512,
                compressed: None,
            },
            per_table: 4,
            directory: None,
            numbers: numbers.to_vec(),
            file_len: 1 << 20,
        }
    }

    fn data(len: u64, at: u64) -> Extent {
        let place = Place::Data { file: 3, at };
        Extent { len, place }
    }

    fn zero(len: u64) -> Extent {
        let place = Place::Zero;
        Extent { len, place }
    }

    #[test]
    fn blocks_that_follow_each_other_are_one_extent() {
        let one = blocks(&[8, 10, 12, 15, 0, 0, 3], 6 * 1024 + 100);
        assert_eq!(one.lookup(0, u64::MAX, 3), data(3072, 4096));
        assert_eq!(one.lookup(1000, 2000, 3), data(2000, 5096));
        assert_eq!(one.lookup(3072, 9999, 3), data(1024, 7680));
        assert_eq!(one.lookup(4100, 9999, 3), zero(2044));
        assert_eq!(one.lookup(6144, 9999, 3), data(100, 1536));
        assert_eq!(one.lookup(6243, 1, 3), data(1, 1635));
    }

    #[test]
    fn tables_without_blocks_are_one_step() {
        let mut two = blocks(&[8, 0, 0, 0, 0, 10], 14 * 1024);
        two.directory = Some(vec![1, 0, 0, 2]);
        assert_eq!(two.lookup(0, 99999, 3), data(1024, 4096));
        assert_eq!(two.lookup(1030, 99999, 3), zero(12 * 1024 - 6));
        assert_eq!(two.lookup(13 * 1024, 99999, 3), data(1024, 5120));
        two.directory = Some(vec![0, 0, 0, 0]);
        assert_eq!(two.lookup(9, 99999, 3), zero(14 * 1024 - 9));
    }

    #[test]
    fn a_look_up_has_an_end() {
        let many = blocks(&vec![0; 10_000], 10_000 * 1024);
        let found = many.lookup(0, u64::MAX, 3).len;
        assert_eq!(found, (1 + u64::from(MAX_STEPS)) * 1024);
        let rest = many.lookup(9_999 * 1024 + 1, u64::MAX, 3);
        assert_eq!(rest, zero(1023));
    }

    #[test]
    fn grains_end_where_the_next_one_starts() {
        let mut grains = blocks(&[8, 9, 20, 12, 0, 30], 5 * 1024 + 10);
        grains.rule.compressed = Some(true);
        grains.file_len = 30 * 512 + 13;
        let len = |index: u64| match grains.lookup(index * 1024 + 5, 99999, 3) {
            Extent {
                len,
                place: Place::Compressed(grain),
            } => (len, grain.len, grain.skip),
            other => panic!("{other:?}"),
        };
        assert_eq!(len(0), (1019, 512, 5));
        assert_eq!(len(1), (1019, 2048, 5));
        assert_eq!(len(2), (1019, 2048, 5));
        assert_eq!(len(3), (1019, 2048, 5));
        assert_eq!(len(5), (5, 13, 5));
        assert_eq!(grains.lookup(4 * 1024, 9999, 3), zero(1024));
    }
}
