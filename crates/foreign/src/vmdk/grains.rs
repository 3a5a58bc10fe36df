//! Two-level grain tables, which all kinds of sparse extents use.

use crate::blocks::{Blocks, Budget, Rule};
use crate::error::{Error, Result};
use crate::source::Source;

/// Unit of all offsets in the tables, in bytes.
pub const SECTOR: u64 = 512;

/// The tables of a sparse extent, as its header describes them.
pub struct Tables {
    pub rule: Rule,
    /// Offset of the grain directory in bytes.
    pub directory_at: u64,
    /// Number of grains per table, which must be large enough that the number of tables is small.
    pub per_table: u64,
}

/// Decodes table entries of `N` bytes.
pub struct Meaning<Table, Place, Grain> {
    /// Returns the number of a table for an entry of the directory; 0 means that there is no table.
    pub table: Table,
    /// Returns the offset in bytes of the table with a number.
    pub place: Place,
    /// Returns the number of a grain for an entry of a table, in the sense of [`Rule`].
    pub grain: Grain,
}

/// Reads the grain directory and all grain tables.
pub fn read<const N: usize>(
    source: &Source,
    tables: &Tables,
    budget: &mut Budget,
    meaning: Meaning<
        impl Fn([u8; N]) -> Result<u32>,
        impl Fn(u32) -> u64,
        impl Fn([u8; N]) -> Result<u64>,
    >,
) -> Result<Blocks> {
    let Tables {
        rule,
        directory_at,
        per_table,
    } = *tables;
    let count = rule.count();
    let table_count = count.div_ceil(per_table);
    let mut directory = budget.table(table_count)?;
    source.entries(directory_at, table_count, "its grain directory", |entry| {
        directory.push((meaning.table)(entry)?);
        Ok(())
    })?;
    let total = directory.iter().filter(|number| **number != 0).count() as u64;
    let mut numbers = budget.table(total.checked_mul(per_table).ok_or(Error::TooLarge)?)?;
    // This loop replaces each directory entry by the position of its table in `numbers`.
    let mut kept = 0;
    for (table, number) in directory.iter_mut().enumerate() {
        if *number == 0 {
            continue;
        }
        let mut index = table as u64 * per_table;
        let used = per_table.min(count - index);
        let at = (meaning.place)(*number);
        source.entries(at, used, "a grain table", |entry| {
            numbers.push(rule.check(index, (meaning.grain)(entry)?, source)?);
            index += 1;
            Ok(())
        })?;
        kept += 1;
        *number = kept;
    }
    Ok(Blocks {
        rule,
        per_table,
        directory: Some(directory),
        numbers,
        file_len: source.len,
    })
}
