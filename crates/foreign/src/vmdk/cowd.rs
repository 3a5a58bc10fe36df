//! Sparse extents of ESX Server, which QEMU calls version 3.
//!
//! These extents are specified in "Virtual Disk Format" 5.0, "ESX Server Sparse Extents".

use super::grains::{self, Meaning, SECTOR, Tables};
use crate::blocks::{Blocks, Budget, Rule};
use crate::bytes::u32_at;
use crate::error::{Error, Result};
use crate::source::Source;

pub const MAGIC: &[u8] = b"COWD";
const LEN: usize = 512;
const VERSION: usize = 4;
const SECTORS: usize = 12;
const GRAIN: usize = 16;
const DIRECTORY: usize = 20;
const DIRECTORY_LEN: usize = 24;

const PER_TABLE: u64 = 4096;
const MAX_GRAIN: u64 = 1 << 21;

/// Returns the number of sectors in the extent and the locations of its blocks.
pub fn read(source: &Source, budget: &mut Budget) -> Result<(u64, Blocks)> {
    let header: [u8; LEN] = source.array(0, "its header")?;
    let version = u32_at(&header, VERSION);
    if version != 1 {
        return Err(Error::unsupported(format!(
            "an ESX sparse extent of version {version} is not supported, only of 1"
        )));
    }
    let field = |at: usize| u64::from(u32_at(&header, at));
    let (sectors, grain) = (field(SECTORS), field(GRAIN));
    if sectors == 0 || grain == 0 || grain > MAX_GRAIN {
        return Err(Error::damaged(format!(
            "an extent of {sectors} sectors with grains of {grain} is not possible"
        )));
    }
    let rule = Rule {
        block: grain * SECTOR,
        size: sectors * SECTOR,
        first: SECTOR,
        unit: SECTOR,
        compressed: None,
    };
    if field(DIRECTORY_LEN) < rule.count().div_ceil(PER_TABLE) {
        return Err(Error::damaged("its grain directory is too short"));
    }
    let tables = Tables {
        rule,
        directory_at: field(DIRECTORY) * SECTOR,
        per_table: PER_TABLE,
    };
    let meaning = Meaning {
        table: |entry| Ok(u32::from_le_bytes(entry)),
        place: |sector| u64::from(sector) * SECTOR,
        grain: |entry| Ok(u32::from_le_bytes(entry).into()),
    };
    let blocks = grains::read(source, &tables, budget, meaning)?;
    Ok((sectors, blocks))
}
