//! VDI, version 1.1 (VirtualBox's `VDICore.h`).

use crate::blocks::{Blocks, Budget, Rule};
use crate::bytes::{u32_at, u64_at};
use crate::describe::{Description, Details};
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::part::{Disk, Layout};
use crate::source::Source;

const SIGNATURE: usize = 0x40;
const VERSION: usize = 0x44;
const TYPE: usize = 0x4c;
const TABLE: usize = 0x154;
const DATA: usize = 0x158;
const SECTOR_SIZE: usize = 0x168;
const SIZE: usize = 0x170;
const BLOCK_SIZE: usize = 0x178;
/// Offset of the number of extra bytes before each block's data.
const BLOCK_EXTRA: usize = 0x17c;
const BLOCKS: usize = 0x180;
/// Offset of the link UUID; all zeroes in an image without a parent.
const LINK: usize = 0x1a8;
const PARENT: usize = 0x1b8;
const UUID_LEN: usize = 16;
/// Size in bytes of the part of the header that contains these fields.
const LEN: usize = 512;

const MAGIC: u32 = 0xbeda_107f;
const VERSION_1_1: u32 = 0x0001_0001;
const SECTOR: u64 = 512;
/// Block size in bytes, the only one that VirtualBox creates and QEMU reads.
const BLOCK: u32 = 1 << 20;
/// Maximum disk size in bytes, as in QEMU: about 1 PiB.
const MAX_SIZE: u64 = 0x3fff_ffff * BLOCK as u64;
/// Table entry of a discarded block; the only higher value marks a block that was never allocated.
const DISCARDED: u32 = 0xffff_fffe;

pub fn read(source: &Source) -> Result<Disk> {
    if !source.holds(0, LEN as u64) {
        return Err(Error::Not(Kind::Vdi));
    }
    let header: [u8; LEN] = source.array(0, "its header")?;
    let fixed = check(&header)?;
    let size = u64_at(&header, SIZE);
    if size > MAX_SIZE {
        return Err(Error::unsupported(format!(
            "a VDI image of {size} bytes is not supported, only of up to {MAX_SIZE}"
        )));
    }
    // VBoxManage creates disks of any size. The size is rounded up, as in QEMU.
    let size = size.next_multiple_of(SECTOR);
    let rule = Rule {
        block: BLOCK.into(),
        size,
        first: u32_at(&header, DATA).into(),
        unit: BLOCK.into(),
        compressed: None,
    };
    let (needed, blocks) = (rule.count(), u32_at(&header, BLOCKS));
    if needed > u64::from(blocks) {
        return Err(Error::damaged(format!(
            "its {blocks} blocks are too few for {size} bytes"
        )));
    }
    let mut numbers = Budget::new().table(needed)?;
    let table = u32_at(&header, TABLE).into();
    source.entries(table, needed, "its block map", |entry| {
        let number = match u32::from_le_bytes(entry) {
            DISCARDED.. => 0,
            number => u64::from(number) + 1,
        };
        numbers.push(rule.check(numbers.len() as u64, number, source)?);
        Ok(())
    })?;
    let blocks = Blocks {
        rule,
        per_table: needed,
        directory: None,
        numbers,
        file_len: source.len,
    };
    let description = Description {
        kind: Kind::Vdi,
        size,
        block_size: Some(rule.block),
        details: Details::Vdi { fixed },
    };
    Ok(Disk::of(Layout::Blocks(blocks), description))
}

/// Checks the header and returns whether the image has a fixed size.
fn check(header: &[u8; LEN]) -> Result<bool> {
    if u32_at(header, SIGNATURE) != MAGIC {
        return Err(Error::Not(Kind::Vdi));
    }
    let version = u32_at(header, VERSION);
    if version != VERSION_1_1 {
        return Err(Error::unsupported(format!(
            "VDI version {}.{} is not supported, only 1.1",
            version >> 16,
            version & 0xffff
        )));
    }
    let has_uuid = |at: usize| header[at..at + UUID_LEN] != [0; UUID_LEN];
    let fixed = match u32_at(header, TYPE) {
        // An undo image has the changes since a start, a differencing image those since a snapshot.
        3 | 4 => return Err(Error::differencing(Kind::Vdi)),
        _ if has_uuid(LINK) || has_uuid(PARENT) => return Err(Error::differencing(Kind::Vdi)),
        1 => false,
        2 => true,
        other => {
            return Err(Error::unsupported(format!(
                "a VDI image of the type {other} is not supported, only of 1 and 2"
            )));
        }
    };
    let expected = [
        ("a sector size", SECTOR_SIZE, SECTOR as u32),
        ("a block size", BLOCK_SIZE, BLOCK),
        ("bytes before each block", BLOCK_EXTRA, 0),
    ];
    for (what, at, only) in expected {
        let found = u32_at(header, at);
        if found != only {
            return Err(Error::unsupported(format!(
                "a VDI image with {what} of {found} is not supported, only of {only}"
            )));
        }
    }
    for (what, at) in [("block map", TABLE), ("first block", DATA)] {
        let place = u32_at(header, at);
        if !u64::from(place).is_multiple_of(SECTOR) {
            return Err(Error::damaged(format!(
                "its {what} is at {place}, which is no multiple of {SECTOR}"
            )));
        }
    }
    Ok(fixed)
}
