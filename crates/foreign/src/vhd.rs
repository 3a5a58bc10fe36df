//! VHD, which QEMU calls vpc ("Virtual Hard Disk Image Format Specification" 1.0).
//!
//! All numbers are big-endian.

use crate::blocks::{Blocks, Budget, Rule};
use crate::bytes::array_at;
use crate::describe::{Description, Details};
use crate::error::{Error, Result};
use crate::kind::{Kind, VhdSize};
use crate::part::{Disk, Layout};
use crate::source::Source;

/// Size of the footer in bytes. A dynamic image has a copy of the footer at its start.
const FOOTER: usize = 512;
const MAGIC: &[u8] = b"conectix";
const HEADER_AT: usize = 16;
const CREATOR: usize = 28;
const CURRENT_SIZE: usize = 48;
const CYLINDERS: usize = 56;
const HEADS: usize = 58;
const SECTORS: usize = 59;
const TYPE: usize = 60;
const CHECKSUM: usize = 64;

/// Size in bytes of the header of a dynamic image.
const HEADER: usize = 1024;
const HEADER_MAGIC: &[u8] = b"cxsparse";
const TABLE: usize = 16;
const ENTRIES: usize = 28;
const BLOCK_SIZE: usize = 32;
const HEADER_CHECKSUM: usize = 36;

const SECTOR: u64 = 512;
/// Table entry of a block that does not exist.
const ABSENT: u32 = u32::MAX;
/// Maximum number of sectors in this format: 2040 GiB.
const MAX_SECTORS: u64 = 0xff00_0000;
/// Number of sectors of the largest geometry, which all disks above this size have.
const MAX_GEOMETRY: u64 = 65535 * 16 * 255;
/// Creators of disks whose size is that of their geometry, as in QEMU since 10.0.
///
/// These creators are Virtual PC, and QEMU without `force_size`. The disks of all other creators
/// have the size in the field Current Size, which the geometry rounds down.
const BY_GEOMETRY: [&[u8; 4]; 2] = [b"vpc ", b"qemu"];

/// Reads an image.
///
/// `size_of` selects the field with the disk size. By default, the image's creator determines it.
pub fn read(source: &Source, size_of: Option<VhdSize>) -> Result<Disk> {
    let (footer, is_at_end) = footer(source)?;
    let size = size(&footer, size_of)?;
    let (layout, block_size) = match u32_at(&footer, TYPE) {
        2 => {
            let room = source.len - FOOTER as u64;
            if size > room {
                return Err(Error::damaged(format!(
                    "its disk has {size} bytes, but its file has room for {room}"
                )));
            }
            (Layout::Flat { at: 0 }, None)
        }
        3 if !is_at_end => {
            let blocks = blocks(source, &footer, size)?;
            let block = blocks.rule.block;
            (Layout::Blocks(blocks), Some(block))
        }
        3 => {
            return Err(Error::damaged(
                "it is a dynamic image without the footer's copy at its start",
            ));
        }
        4 => return Err(Error::differencing(Kind::Vhd)),
        other => {
            return Err(Error::unsupported(format!(
                "a VHD image of the type {other} is not supported, only of 2 and 3"
            )));
        }
    };
    let creator = footer[CREATOR..CREATOR + 4].iter();
    let description = Description {
        kind: Kind::Vhd,
        size,
        block_size,
        details: Details::Vhd {
            fixed: block_size.is_none(),
            creator: creator
                .map(|byte| char::from(*byte))
                .filter(|letter| matches!(letter, ' '..='~'))
                .collect(),
        },
    };
    Ok(Disk::of(layout, description))
}

/// Returns the footer, and whether it was found only at the end of the file.
fn footer(source: &Source) -> Result<([u8; FOOTER], bool)> {
    let end = source.len.checked_sub(FOOTER as u64);
    let end = end.ok_or(Error::Not(Kind::Vhd))?;
    for at in [0, end] {
        let footer: [u8; FOOTER] = source.array(at, "its footer")?;
        if footer.starts_with(MAGIC) {
            check_sum(&footer, CHECKSUM, "footer")?;
            return Ok((footer, at != 0));
        }
    }
    Err(Error::Not(Kind::Vhd))
}

/// Checks that the checksum is the inverted sum of all bytes except those of the checksum itself.
fn check_sum(bytes: &[u8], at: usize, what: &str) -> Result<()> {
    let stored = u32_at(bytes, at);
    let add = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>();
    let sum = add(bytes) - add(&bytes[at..at + 4]);
    if stored == !sum {
        return Ok(());
    }
    Err(Error::damaged(format!(
        "the checksum of its {what} is wrong"
    )))
}

/// Returns the size of the disk in bytes.
fn size(footer: &[u8; FOOTER], size_of: Option<VhdSize>) -> Result<u64> {
    let creator: [u8; 4] = array_at(footer, CREATOR);
    let cylinders = u16::from_be_bytes(array_at(footer, CYLINDERS));
    let geometry = u64::from(cylinders) * u64::from(footer[HEADS]) * u64::from(footer[SECTORS]);
    let by_creator = match BY_GEOMETRY.contains(&&creator) {
        true => VhdSize::Geometry,
        false => VhdSize::Current,
    };
    let sectors = match size_of.unwrap_or(by_creator) {
        VhdSize::Geometry if geometry != MAX_GEOMETRY => geometry,
        VhdSize::Geometry | VhdSize::Current => u64_at(footer, CURRENT_SIZE) / SECTOR,
    };
    if sectors > MAX_SECTORS {
        return Err(Error::damaged(format!(
            "its disk has {sectors} sectors, more than the {MAX_SECTORS} of this format"
        )));
    }
    Ok(sectors * SECTOR)
}

fn blocks(source: &Source, footer: &[u8; FOOTER], size: u64) -> Result<Blocks> {
    let header: [u8; HEADER] = source.array(u64_at(footer, HEADER_AT), "its dynamic header")?;
    if !header.starts_with(HEADER_MAGIC) {
        return Err(Error::damaged("there is no dynamic header in its place"));
    }
    check_sum(&header, HEADER_CHECKSUM, "dynamic header")?;
    let block = u64::from(u32_at(&header, BLOCK_SIZE));
    if !block.is_power_of_two() || block < SECTOR {
        return Err(Error::damaged(format!(
            "its blocks have {block} bytes, which is no power of two"
        )));
    }
    // A bitmap with one bit per sector precedes each block's data. On a disk without a parent the
    // bitmap does not matter, because unwritten sectors contain zeroes. QEMU ignores the bitmap,
    // too.
    let bits = (block / SECTOR / 8).next_multiple_of(SECTOR);
    let rule = Rule {
        block,
        size,
        first: SECTOR + bits,
        unit: SECTOR,
        compressed: None,
    };
    let (needed, entries) = (rule.count(), u32_at(&header, ENTRIES));
    if needed > u64::from(entries) {
        return Err(Error::damaged(format!(
            "its table of {entries} blocks is too short for {size} bytes"
        )));
    }
    let mut numbers = Budget::new().table(needed)?;
    source.entries(
        u64_at(&header, TABLE),
        needed,
        "its table of blocks",
        |entry| {
            let number = match u32::from_be_bytes(entry) {
                ABSENT => 0,
                0 => return Err(Error::damaged("a block is where the footer's copy is")),
                number => number.into(),
            };
            numbers.push(rule.check(numbers.len() as u64, number, source)?);
            Ok(())
        },
    )?;
    Ok(Blocks {
        rule,
        per_table: needed,
        directory: None,
        numbers,
        file_len: source.len,
    })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array_at(bytes, at))
}
