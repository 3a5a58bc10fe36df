//! Hosted sparse extents, including stream-optimized ones.
//!
//! Hosted sparse extents are specified in "Virtual Disk Format" 5.0, "Hosted Sparse Extents".

use super::descriptor::{self, Descriptor};
use super::grains::{self, Meaning, SECTOR, Tables};
use crate::blocks::{Blocks, Budget, Rule};
use crate::bytes::{array_at, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};
use crate::source::Source;

pub const MAGIC: &[u8] = b"KDMV";
/// Error for a file that has the magic number of an extent but no descriptor.
pub const IS_A_PART: &str =
    "this is a part of a VMDK image: give the text file that names its parts";

const LEN: usize = 512;
const VERSION: usize = 4;
const FLAGS: usize = 8;
const CAPACITY: usize = 12;
const GRAIN: usize = 20;
const DESCRIPTOR_AT: usize = 28;
const DESCRIPTOR_LEN: usize = 36;
const PER_TABLE: usize = 44;
const DIRECTORY: usize = 56;
const OVERHEAD: usize = 64;
const LINE_ENDS: usize = 73;
const COMPRESSION: usize = 77;

const FLAG_LINE_ENDS: u32 = 1;
const FLAG_ZERO_GRAINS: u32 = 1 << 2;
const FLAG_MARKERS: u32 = 1 << 17;
const DEFLATE: u16 = 1;
/// Directory offset that means that the valid header is in a footer at the end of the file.
const AT_END: u64 = u64::MAX;
/// Table entry of a grain that contains only zeroes.
const ZERO_GRAIN: u32 = 1;

/// Number of grains per table, the only one that the specification allows.
const GRAINS_PER_TABLE: u32 = 512;
/// Maximum number of bytes of a descriptor that are read.
const MAX_DESCRIPTOR: u64 = 1 << 20;
const MAX_CAPACITY: u64 = 1 << 54;
/// Maximum number of sectors per grain: 1 GiB, as in QEMU.
///
/// The constant below limits compressed grains to 1 MiB, because a read of any part of such a grain
/// decompresses all of it.
const MAX_GRAIN: u64 = 1 << 21;
const MAX_COMPRESSED_GRAIN: u64 = 1 << 11;

/// A sparse extent.
pub struct Extent {
    pub sectors: u64,
    pub blocks: Blocks,
}

/// Returns the offset and length in bytes of the descriptor if the file contains nothing else.
pub fn only_descriptor(source: &Source) -> Result<Option<(u64, u64)>> {
    let header: [u8; LEN] = source.array(0, "its header")?;
    match u64_at(&header, CAPACITY) {
        0 => descriptor_place(&header),
        _ => Ok(None),
    }
}

fn descriptor_place(header: &[u8; LEN]) -> Result<Option<(u64, u64)>> {
    let (at, len) = (
        u64_at(header, DESCRIPTOR_AT),
        u64_at(header, DESCRIPTOR_LEN),
    );
    let place = (at.checked_mul(SECTOR)).zip(len.checked_mul(SECTOR));
    match place {
        Some((0, _)) => Ok(None),
        Some((at, len)) => Ok(Some((at, len.min(MAX_DESCRIPTOR)))),
        None => Err(Error::damaged("its descriptor is at no possible place")),
    }
}

/// Reads the descriptor inside an extent that is a complete image.
pub fn inner_descriptor(source: &Source) -> Result<Descriptor> {
    let header: [u8; LEN] = source.array(0, "its header")?;
    let part = || Error::unsupported(IS_A_PART);
    let (at, len) = descriptor_place(&header)?.ok_or_else(part)?;
    let text = source.up_to(at, len as usize)?;
    // QEMU reserves space for a descriptor in each part and leaves it empty.
    if text.first().is_none_or(|&byte| byte == 0) {
        return Err(part());
    }
    descriptor::parse(&text)
}

pub fn read(source: &Source, budget: &mut Budget) -> Result<Extent> {
    let mut header: [u8; LEN] = source.array(0, "its header")?;
    if u64_at(&header, DIRECTORY) == AT_END {
        header = footer(source)?;
    }
    let tables = check(&header, source)?;
    let has_zero_grains = u32_at(&header, FLAGS) & FLAG_ZERO_GRAINS != 0;
    let meaning = Meaning {
        table: |entry| Ok(u32::from_le_bytes(entry)),
        place: |sector| u64::from(sector) * SECTOR,
        grain: |entry| match u32::from_le_bytes(entry) {
            ZERO_GRAIN if has_zero_grains => Ok(0),
            number => Ok(number.into()),
        },
    };
    let blocks = grains::read(source, &tables, budget, meaning)?;
    Ok(Extent {
        sectors: u64_at(&header, CAPACITY),
        blocks,
    })
}

/// Reads the footer, a copy of the header at the end of the file.
///
/// The footer is between its own marker and the end-of-stream marker. Each of the three occupies a
/// sector.
fn footer(source: &Source) -> Result<[u8; LEN]> {
    let end = source.len.next_multiple_of(SECTOR);
    let read = |back: u64| -> Result<[u8; LEN]> {
        let at = end.checked_sub(back * SECTOR);
        let mut bytes = source.up_to(at.ok_or_else(wrong_footer)?, LEN)?;
        bytes.resize(LEN, 0);
        Ok(array_at(&bytes, 0))
    };
    let marker = |bytes: [u8; LEN]| (u32_at(&bytes, 8), u32_at(&bytes, 12));
    let (before, header, after) = (read(3)?, read(2)?, read(1)?);
    let is_end = marker(after) == (0, 0) && u64_at(&after, 0) == 0;
    if marker(before) != (0, 3) || !header.starts_with(MAGIC) || !is_end {
        return Err(wrong_footer());
    }
    Ok(header)
}

fn wrong_footer() -> Error {
    Error::damaged("it has no footer at its end, as if it were only a part of the file")
}

fn check(header: &[u8; LEN], source: &Source) -> Result<Tables> {
    if !header.starts_with(MAGIC) {
        return Err(Error::damaged("a part of it is not a sparse VMDK extent"));
    }
    let version = u32_at(header, VERSION);
    if !(1..=3).contains(&version) {
        return Err(Error::unsupported(format!(
            "a sparse VMDK extent of version {version} is not supported, only of 1 to 3"
        )));
    }
    let flags = u32_at(header, FLAGS);
    let line_ends: [u8; 4] = array_at(header, LINE_ENDS);
    if flags & FLAG_LINE_ENDS != 0 && line_ends != *b"\n \r\n" {
        return Err(Error::damaged(
            "it was copied as if it were a text, which changes what looks like ends of lines",
        ));
    }
    let compressed = match u16_at(header, COMPRESSION) {
        0 => None,
        DEFLATE => Some(flags & FLAG_MARKERS != 0),
        other => {
            return Err(Error::unsupported(format!(
                "a VMDK image with the compression {other} is not supported, only with 1"
            )));
        }
    };
    let (capacity, grain) = (u64_at(header, CAPACITY), u64_at(header, GRAIN));
    let max_grain = match compressed {
        Some(_) => MAX_COMPRESSED_GRAIN,
        None => MAX_GRAIN,
    };
    let per_table = u32_at(header, PER_TABLE);
    if !grain.is_power_of_two() || grain > max_grain {
        return Err(Error::damaged(format!(
            "its grains have {grain} sectors, which is no power of two up to {max_grain}"
        )));
    }
    if !(1..=MAX_CAPACITY).contains(&capacity) {
        return Err(Error::damaged(format!(
            "a disk of {capacity} sectors is not possible"
        )));
    }
    if per_table != GRAINS_PER_TABLE {
        return Err(Error::unsupported(format!(
            "a sparse VMDK extent with {per_table} grains in a table is not supported, only with \
             {GRAINS_PER_TABLE}"
        )));
    }
    // The overhead covers everything before the first grain.
    let overhead = u64_at(header, OVERHEAD).checked_mul(SECTOR);
    if overhead.is_none_or(|overhead| overhead > source.len) {
        return Err(Error::damaged("its file ends before its first grain"));
    }
    let directory_at = u64_at(header, DIRECTORY).checked_mul(SECTOR);
    let rule = Rule {
        block: grain * SECTOR,
        size: capacity * SECTOR,
        first: SECTOR,
        unit: SECTOR,
        compressed,
    };
    Ok(Tables {
        rule,
        directory_at: directory_at.ok_or_else(|| Error::damaged("it has no grain directory"))?,
        per_table: per_table.into(),
    })
}
