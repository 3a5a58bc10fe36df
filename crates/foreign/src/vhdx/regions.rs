//! Reads the region table, which locates the other tables (section 2.2.3).

use super::crc;
use super::header::{ALIGNMENT, Log};
use crate::bytes::{array_at, u32_at, u64_at};
use crate::error::{Error, Result};
use crate::source::Source;

/// Offsets in bytes of the two copies of the region table.
const PLACES: [u64; 2] = [192 << 10, 256 << 10];
const LEN: usize = 64 << 10;
const MAGIC: &[u8] = b"regi";
const CHECKSUM: usize = 4;
const COUNT: usize = 8;
const ENTRIES: usize = 16;
const ENTRY: usize = 32;
const MAX_ENTRIES: u32 = 2047;

/// GUID of the block allocation table: 2DC27766-F623-4200-9D64-115E9BFD4A08.
const BLOCKS: [u8; 16] = [
    0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42, 0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 0x08,
];
/// GUID of the metadata region: 8B7CA206-4790-4B9A-B8FE-575F050F886E.
const METADATA: [u8; 16] = [
    0x06, 0xa2, 0x7c, 0x8b, 0x90, 0x47, 0x9a, 0x4b, 0xb8, 0xfe, 0x57, 0x5f, 0x05, 0x0f, 0x88, 0x6e,
];

/// A contiguous range of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Region {
    pub at: u64,
    pub end: u64,
}

impl Region {
    pub fn holds(&self, at: u64, end: u64) -> bool {
        self.at <= at && end <= self.end
    }
}

pub struct Regions {
    /// The block allocation table.
    pub blocks: Region,
    pub metadata: Region,
    /// All ranges that contain no guest data, in order.
    reserved: Vec<Region>,
}

impl Regions {
    pub fn read(source: &Source, log: &Log) -> Result<Regions> {
        let mut table = vec![0; LEN];
        let mut is_valid = false;
        for at in PLACES {
            source.read(&mut table, at, "a table of regions")?;
            is_valid = table.starts_with(MAGIC) && crc::is_right(&table, CHECKSUM);
            if is_valid {
                break;
            }
        }
        let count = u32_at(&table, COUNT);
        if !is_valid || count > MAX_ENTRIES {
            return Err(Error::damaged("it has no valid table of regions"));
        }
        let log_end = log.at + u64::from(log.len);
        let mut reserved = vec![
            Region {
                at: 0,
                end: ALIGNMENT,
            },
            Region {
                at: log.at,
                end: log_end,
            },
        ];
        let (mut blocks, mut metadata) = (None, None);
        for entry in table[ENTRIES..].chunks_exact(ENTRY).take(count as usize) {
            let region = region(entry)?;
            reserved.push(region);
            let place = match array_at(entry, 0) {
                BLOCKS => &mut blocks,
                METADATA => &mut metadata,
                _ if u32_at(entry, 28) & 1 == 0 => continue,
                _ => {
                    return Err(Error::unsupported(
                        "this VHDX image has a region that must be understood and is not: convert \
                         it with the program that made it",
                    ));
                }
            };
            if place.replace(region).is_some() {
                return Err(Error::damaged("it has two regions for the same"));
            }
        }
        reserved.retain(|region| region.at < region.end);
        reserved.sort();
        if reserved.windows(2).any(|pair| pair[0].end > pair[1].at) {
            return Err(Error::damaged("its regions overlap"));
        }
        let (Some(blocks), Some(metadata)) = (blocks, metadata) else {
            return Err(Error::damaged("it has no region for its tables"));
        };
        Ok(Regions {
            blocks,
            metadata,
            reserved,
        })
    }

    /// Returns whether the range from `at` to `end` overlaps no reserved range.
    pub fn leave_free(&self, at: u64, end: u64) -> bool {
        let after = { &self.reserved }.partition_point(|region| region.end <= at);
        let next = self.reserved.get(after);
        next.is_none_or(|region| end <= region.at)
    }
}

fn region(entry: &[u8]) -> Result<Region> {
    let (at, len) = (u64_at(entry, 16), u64::from(u32_at(entry, 24)));
    let is_aligned = at.is_multiple_of(ALIGNMENT) && len.is_multiple_of(ALIGNMENT);
    match at.checked_add(len) {
        Some(end) if is_aligned && at >= ALIGNMENT && len > 0 => Ok(Region { at, end }),
        _ => Err(Error::damaged(format!(
            "a region of {len} bytes at {at} is not in a place for it"
        ))),
    }
}
