//! Reads the metadata, which describes the disk (section 2.6).

use super::regions::Region;
use crate::bytes::{array_at, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};
use crate::kind::Kind;
use crate::source::Source;

/// Size in bytes of the metadata table at the start of the region.
const LEN: usize = 64 << 10;
const MAGIC: &[u8] = b"metadata";
const COUNT: usize = 10;
const ENTRY: usize = 32;
const MAX_ENTRIES: u16 = 2047;
/// Offset of the item's location within an entry; the constants below are further such offsets.
const ITEM_AT: usize = 16;
const ITEM_LEN: usize = 20;
const FLAGS: usize = 24;
const FLAG_REQUIRED: u32 = 4;

/// GUID of the file parameters, block size and flags: CAA16737-FA36-4D43-B3B6-33F0AA44E76B.
const PARAMETERS: [u8; 16] = [
    0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d, 0xb3, 0xb6, 0x33, 0xf0, 0xaa, 0x44, 0xe7, 0x6b,
];
/// GUID of the virtual disk size: 2FA54224-CD1B-4876-B211-5DBED83BF4B8.
const DISK_SIZE: [u8; 16] = [
    0x24, 0x42, 0xa5, 0x2f, 0x1b, 0xcd, 0x76, 0x48, 0xb2, 0x11, 0x5d, 0xbe, 0xd8, 0x3b, 0xf4, 0xb8,
];
/// GUID of the disk's identity: BECA12AB-B2E6-4523-93EF-C309E000C746.
const PAGE_83: [u8; 16] = [
    0xab, 0x12, 0xca, 0xbe, 0xe6, 0xb2, 0x23, 0x45, 0x93, 0xef, 0xc3, 0x09, 0xe0, 0x00, 0xc7, 0x46,
];
/// GUID of the logical sector size: 8141BF1D-A96F-4709-BA47-F233A8FAAB5F.
const LOGICAL: [u8; 16] = [
    0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47, 0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab, 0x5f,
];
/// GUID of the physical sector size: CDA348C7-445D-4471-9CC9-E9885251C556.
const PHYSICAL: [u8; 16] = [
    0xc7, 0x48, 0xa3, 0xcd, 0x5d, 0x44, 0x71, 0x44, 0x9c, 0xc9, 0xe9, 0x88, 0x52, 0x51, 0xc5, 0x56,
];
/// GUID of the parent locator: A8D35F2D-B30B-454D-ABF7-D3D84834AB0C.
const PARENT: [u8; 16] = [
    0x2d, 0x5f, 0xd3, 0xa8, 0x0b, 0xb3, 0x4d, 0x45, 0xab, 0xf7, 0xd3, 0xd8, 0x48, 0x34, 0xab, 0x0c,
];

/// Flag in the file parameters: all blocks remain allocated.
const ALL_ALLOCATED: u32 = 1;
const HAS_PARENT: u32 = 2;

/// Maximum disk size in bytes: 64 TiB.
const MAX_SIZE: u64 = 64 << 40;
const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 1 << 20..=256 << 20;

/// The checked contents of the metadata items.
pub struct Metadata {
    /// Block size in bytes, a power of two.
    pub block: u32,
    /// Whether all blocks were allocated when the image was created.
    pub fixed: bool,
    pub size: u64,
    /// Logical sector size in bytes: 512 or 4096.
    pub logical: u32,
    pub physical: u32,
}

pub fn read(source: &Source, region: Region) -> Result<Metadata> {
    let mut table = vec![0; LEN];
    source.read(&mut table, region.at, "its table of metadata")?;
    let count = u16_at(&table, COUNT);
    if !table.starts_with(MAGIC) || count > MAX_ENTRIES {
        return Err(Error::damaged("it has no valid table of metadata"));
    }
    let entries = table[ENTRY..].chunks_exact(ENTRY).take(count.into());
    let entries: Vec<&[u8]> = entries.collect();
    let known = [PARAMETERS, DISK_SIZE, PAGE_83, LOGICAL, PHYSICAL, PARENT];
    let unknown = |entry: &&[u8]| {
        !known.contains(&array_at(entry, 0)) && u32_at(entry, FLAGS) & FLAG_REQUIRED != 0
    };
    if entries.iter().any(unknown) {
        return Err(Error::unsupported(
            "this VHDX image has metadata that must be understood and is not: convert it with the \
             program that made it",
        ));
    }
    let items = Items {
        source,
        region,
        entries,
    };
    items.read()
}

struct Items<'a> {
    source: &'a Source<'a>,
    region: Region,
    entries: Vec<&'a [u8]>,
}

impl Items<'_> {
    fn read(&self) -> Result<Metadata> {
        let parameters: [u8; 8] = self.item(&PARAMETERS, "block size")?;
        let [block, flags] = [0, 4].map(|at| u32_at(&parameters, at));
        let has_locator = self.entries.iter().any(|entry| entry.starts_with(&PARENT));
        if flags & HAS_PARENT != 0 || has_locator {
            return Err(Error::differencing(Kind::Vhdx));
        }
        if !block.is_power_of_two() || !BLOCK_SIZES.contains(&block) {
            return Err(Error::damaged(format!(
                "its blocks have {block} bytes, which is no power of two from 1 to 256 MiB"
            )));
        }
        let logical = self.sector(&LOGICAL, "logical sector size")?;
        let physical = self.sector(&PHYSICAL, "physical sector size")?;
        let size = u64_at(&self.item::<8>(&DISK_SIZE, "disk size")?, 0);
        if size > MAX_SIZE || !size.is_multiple_of(logical.into()) {
            return Err(Error::damaged(format!(
                "a disk of {size} bytes with sectors of {logical} is not possible"
            )));
        }
        Ok(Metadata {
            block,
            fixed: flags & ALL_ALLOCATED != 0,
            size,
            logical,
            physical,
        })
    }

    fn sector(&self, guid: &[u8; 16], what: &str) -> Result<u32> {
        let size = u32_at(&self.item::<4>(guid, what)?, 0);
        match size {
            512 | 4096 => Ok(size),
            _ => Err(Error::damaged(format!(
                "its {what} is {size}, not 512 or 4096"
            ))),
        }
    }

    fn item<const N: usize>(&self, guid: &[u8; 16], what: &str) -> Result<[u8; N]> {
        let mut found = { self.entries.iter() }.filter(|entry| entry.starts_with(guid));
        let (Some(entry), None) = (found.next(), found.next()) else {
            return Err(Error::damaged(format!(
                "its metadata does not have one {what}"
            )));
        };
        let at = self.region.at + u64::from(u32_at(entry, ITEM_AT));
        let len = u32_at(entry, ITEM_LEN);
        if len as usize != N || !self.region.holds(at, at + N as u64) {
            return Err(Error::damaged(format!(
                "its {what} is not where metadata is"
            )));
        }
        self.source.array(at, what)
    }
}
