//! Reads an image.

use super::header;
use super::log::{self, must_be_replayed};
use super::metadata::{self, Metadata};
use super::overlay::Overlay;
use super::regions::Regions;
use crate::blocks::{Blocks, Budget, Rule};
use crate::describe::{Description, Details};
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::part::{Disk, Layout};
use crate::source::Source;

/// Unit of block offsets in bytes.
const UNIT: u64 = header::ALIGNMENT;
/// Mask of the state in a table entry (section 2.5.1); the offset is in the upper 44 bits.
const STATE: u64 = 7;
const OFFSET_SHIFT: u32 = 20;
/// Number of sectors that one bitmap block covers.
///
/// In the table, the entry of a bitmap block follows the entries of the blocks that it covers. An
/// image without a parent has these entries, but no bitmap blocks.
const SECTORS_PER_BITMAP: u64 = 1 << 23;

pub fn read(source: &Source) -> Result<Disk> {
    let log = header::read(source)?;
    let overlay = Overlay {
        source: *source,
        changes: log::changes(source, &log)?,
    };
    let tables = Source::new(&overlay)?;
    let regions = Regions::read(&tables, &log)?;
    // The overlay applies the log only to tables, whereas guest data is read directly from the
    // file. Therefore changes to anything but tables are refused.
    let is_of_tables = |at, end| {
        end <= header::ALIGNMENT || regions.blocks.holds(at, end) || regions.metadata.holds(at, end)
    };
    let mut changes = overlay.changes.iter();
    if !changes.all(|change| is_of_tables(change.at, change.at + change.len)) {
        return Err(must_be_replayed());
    }
    let metadata = metadata::read(&tables, regions.metadata)?;
    let blocks = blocks(source, &tables, &regions, &metadata)?;
    let description = Description {
        kind: Kind::Vhdx,
        size: metadata.size,
        block_size: Some(metadata.block.into()),
        details: Details::Vhdx {
            fixed: metadata.fixed,
            logical_sector_size: metadata.logical,
            physical_sector_size: metadata.physical,
            log_changes: overlay.changes.len(),
        },
    };
    Ok(Disk::of(Layout::Blocks(blocks), description))
}

fn blocks(
    source: &Source,
    tables: &Source,
    regions: &Regions,
    metadata: &Metadata,
) -> Result<Blocks> {
    let rule = Rule {
        block: metadata.block.into(),
        size: metadata.size,
        first: UNIT,
        unit: UNIT,
        compressed: None,
    };
    let count = rule.count();
    let per_bitmap = SECTORS_PER_BITMAP * u64::from(metadata.logical) / rule.block;
    let entries = count + count.saturating_sub(1) / per_bitmap;
    let room = (regions.blocks.end - regions.blocks.at) / size_of::<u64>() as u64;
    if entries > room {
        return Err(Error::damaged(format!(
            "its table of {room} blocks is too short for {} bytes",
            rule.size
        )));
    }
    let mut numbers = Budget::new().table(count)?;
    let mut position = 0;
    tables.entries(regions.blocks.at, entries, "its table of blocks", |entry| {
        position += 1;
        if position % (per_bitmap + 1) == 0 {
            return Ok(());
        }
        let index = numbers.len() as u64;
        let number = block(u64::from_le_bytes(entry), index)?;
        let at = number.saturating_mul(UNIT);
        if number > 0 && !regions.leave_free(at, at.saturating_add(rule.used(index))) {
            return Err(Error::damaged(format!(
                "block {index} is where its tables are"
            )));
        }
        numbers.push(rule.check(index, number, source)?);
        Ok(())
    })?;
    Ok(Blocks {
        rule,
        per_table: count,
        directory: None,
        numbers,
        file_len: source.len,
    })
}

/// Returns the offset of block `index` in units from the start of the file; 0 if there is no block.
fn block(entry: u64, index: u64) -> Result<u64> {
    match entry & STATE {
        // The states are: not present, undefined, zero and unmapped. State 5 meant unmapped in
        // version 0.95. As in QEMU, all of them read as zeroes.
        0..=3 | 5 => Ok(0),
        6 => match entry >> OFFSET_SHIFT {
            0 => Err(Error::damaged(format!(
                "block {index} is where its tables are"
            ))),
            number => Ok(number),
        },
        state => Err(Error::damaged(format!(
            "block {index} has the state {state}, which an image without a parent does not have"
        ))),
    }
}
