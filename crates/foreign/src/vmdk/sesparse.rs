//! Space-efficient sparse extents of ESXi.
//!
//! No public specification exists. This code accepts and refuses the same extents as QEMU.

use super::grains::{self, Meaning, SECTOR, Tables};
use crate::blocks::{Blocks, Budget, Rule};
use crate::bytes::u64_at;
use crate::error::{Error, Result};
use crate::source::Source;

const LEN: usize = 512;
const MAGIC: u64 = 0xcafe_babe;
const VERSION: u64 = 0x2_0000_0001;
const CAPACITY: usize = 16;
const VOLATILE: usize = 80;
const DIRECTORY: usize = 128;
const DIRECTORY_LEN: usize = 136;
const TABLES: usize = 144;
const GRAINS: usize = 192;
/// Offset from which the header contains only zeroes.
const PAD: usize = 208;

/// Magic number of the volatile header, a second header that is updated when the extent is written.
const VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const REPLAY: usize = 24;
const VOLATILE_PAD: usize = 32;

/// Number of sectors per grain.
const GRAIN: u64 = 8;
/// Number of sectors per grain table; the constant below is the number of its entries.
const TABLE: u64 = 64;
const PER_TABLE: u64 = TABLE * SECTOR / size_of::<u64>() as u64;
const MAX_CAPACITY: u64 = 1 << 54;

/// Returns the number of sectors in the extent and the locations of its blocks.
pub fn read(source: &Source, budget: &mut Budget) -> Result<(u64, Blocks)> {
    let header: [u8; LEN] = source.array(0, "its header")?;
    check(&header)?;
    check_volatile(&source.array(place(&header, VOLATILE)?, "its second header")?)?;
    let capacity = u64_at(&header, CAPACITY);
    if !(1..=MAX_CAPACITY).contains(&capacity) {
        return Err(Error::damaged(format!(
            "a disk of {capacity} sectors is not possible"
        )));
    }
    let rule = Rule {
        block: GRAIN * SECTOR,
        size: capacity * SECTOR,
        first: place(&header, GRAINS)?,
        unit: GRAIN * SECTOR,
        compressed: None,
    };
    let tables = Tables {
        rule,
        directory_at: place(&header, DIRECTORY)?,
        per_table: PER_TABLE,
    };
    let directory_len = place(&header, DIRECTORY_LEN)? / size_of::<u64>() as u64;
    if directory_len < rule.count().div_ceil(PER_TABLE) {
        return Err(Error::damaged("its grain directory is too short"));
    }
    let tables_at = place(&header, TABLES)?;
    if tables_at > source.len {
        return Err(Error::damaged("its grain tables are not in its file"));
    }
    let meaning = Meaning {
        table,
        place: |number| u64::from(number - 1) * TABLE * SECTOR + tables_at,
        grain,
    };
    let blocks = grains::read(source, &tables, budget, meaning)?;
    Ok((capacity, blocks))
}

/// Decodes an entry of the directory. Table numbers start at 1.
fn table(entry: [u8; 8]) -> Result<u32> {
    let entry = u64::from_le_bytes(entry);
    match (entry >> 32, entry as u32) {
        (0, 0) => Ok(0),
        (0x1000_0000, number) => number.checked_add(1).ok_or_else(wrong_entry),
        _ => Err(wrong_entry()),
    }
}

/// Decodes an entry of a table. Grain numbers start at 1.
///
/// In the entry, the low 12 bits of a grain's number are stored above the high bits.
fn grain(entry: [u8; 8]) -> Result<u64> {
    let entry = u64::from_le_bytes(entry);
    match entry >> 60 {
        0 if entry == 0 => Ok(0),
        // The guest has discarded the grain, so it reads as zeroes.
        1 | 2 => Ok(0),
        3 => Ok(1 + (entry >> 48 & 0xfff | (entry & 0xffff_ffff_ffff) << 12)),
        _ => Err(wrong_entry()),
    }
}

fn wrong_entry() -> Error {
    Error::damaged("an entry of its grain tables has an unknown state")
}

/// Reads the header field at `at`, which is a number of sectors, and converts it to bytes.
fn place(header: &[u8; LEN], at: usize) -> Result<u64> {
    let place = u64_at(header, at).checked_mul(SECTOR);
    place.ok_or_else(|| Error::damaged(format!("its header has no possible place at {at}")))
}

fn check(header: &[u8; LEN]) -> Result<()> {
    if u64_at(header, 0) != MAGIC {
        return Err(Error::damaged("a part of it is not a seSparse extent"));
    }
    let fixed = [
        ("version", 8, VERSION),
        ("grain size", 24, GRAIN),
        ("grain table size", 32, TABLE),
        ("flags", 40, 0),
        ("reserved field", 48, 0),
        ("reserved field", 56, 0),
        ("reserved field", 64, 0),
        ("reserved field", 72, 0),
    ];
    for (what, at, only) in fixed {
        let found = u64_at(header, at);
        if found != only {
            return Err(Error::unsupported(format!(
                "a seSparse extent with a {what} of {found:#x} is not supported, only of {only:#x}"
            )));
        }
    }
    check_pad(&header[PAD..])
}

fn check_volatile(header: &[u8; LEN]) -> Result<()> {
    if u64_at(header, 0) != VOLATILE_MAGIC {
        return Err(Error::damaged("its second header is not there"));
    }
    if u64_at(header, REPLAY) != 0 {
        return Err(Error::unsupported(
            "this seSparse extent was not closed, and changes in its journal are not made here: \
             open it once with ESXi",
        ));
    }
    check_pad(&header[VOLATILE_PAD..])
}

fn check_pad(pad: &[u8]) -> Result<()> {
    match pad.iter().all(|&byte| byte == 0) {
        true => Ok(()),
        false => Err(Error::unsupported(
            "a seSparse extent with further fields is not supported",
        )),
    }
}
