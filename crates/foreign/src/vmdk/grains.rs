//! Tables of grains, of two levels, of whichever kind of sparse extent.

use crate::blocks::{Blocks, Budget, Rule};
use crate::error::{Error, Result};
use crate::source::Source;

/// All places are in such.
pub const SECTOR: u64 = 512;

/// A sparse extent's tables: what its header says.
pub struct Tables {
    pub rule: Rule,
    /// Where the directory is, in bytes.
    pub directory_at: u64,
    /// Grains of a table; so many that there are not many tables.
    pub per_table: u64,
}

/// What entries of `N` bytes mean.
pub struct Meaning<Table, Place, Grain> {
    /// The number of a table, of an entry of the directory; 0: no table.
    pub table: Table,
    /// Where the table of a number is, in bytes.
    pub place: Place,
    /// The number of a grain, of an entry of a table, as [`Rule`] has it.
    pub grain: Grain,
}

/// Reads the directory, and all tables.
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
    // From here on an entry is the number of one of the tables that are kept.
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
