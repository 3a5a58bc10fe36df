//! Writes the partition table (MBR) in the first sector of a disk image.

use crate::error::{Error, Result};

pub const SECTOR: u64 = 512;
/// Offset of the table in the first sector, in bytes.
pub const TABLE: usize = 446;
const ENTRY: usize = 16;
const MOST: usize = 4;

/// Type of an EFI system partition (UEFI specification, 5.2.2).
pub const EFI_SYSTEM: u8 = 0xef;
/// Type of a partition with a Linux file system.
pub const LINUX: u8 = 0x83;

/// A partition, with its start and size in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    pub kind: u8,
    pub first: u64,
    pub sectors: u64,
}

/// Returns the first sector from [`TABLE`] to its end. Entries have only block numbers, without
/// cylinders, heads and sectors.
///
/// # Errors
/// When there are more than four partitions, or a start or size does not fit into 32 bits (2 TiB).
pub fn table(partitions: &[Partition]) -> Result<[u8; SECTOR as usize - TABLE]> {
    let refuse = |what: &str| Error::Protocol(format!("no such partition table: {what}"));
    if partitions.len() > MOST {
        return Err(refuse("it has four entries"));
    }
    let field = |value: u64| -> Result<[u8; 4]> {
        let value = u32::try_from(value).map_err(|_| refuse("it reaches 2 TiB"))?;
        Ok(value.to_le_bytes())
    };
    let mut table = [0; SECTOR as usize - TABLE];
    for (partition, entry) in partitions.iter().zip(table.chunks_exact_mut(ENTRY)) {
        entry[4] = partition.kind;
        entry[8..12].copy_from_slice(&field(partition.first)?);
        entry[12..].copy_from_slice(&field(partition.sectors)?);
    }
    table[MOST * ENTRY..].copy_from_slice(&[0x55, 0xaa]);
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host;

    #[test]
    fn partitions_are_where_sfdisk_finds_them() {
        let partition = |kind, first, sectors| Partition {
            kind,
            first,
            sectors,
        };
        let two = [partition(LINUX, 2048, 4096), partition(EFI_SYSTEM, 6144, 9)];
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let mut disk = vec![0; TABLE];
        disk.extend_from_slice(&table(&two).unwrap());
        disk.resize(1 << 23, 0);
        std::fs::write(&image, disk).unwrap();
        let said = host::run("sfdisk", &["--dump", &image.to_string_lossy()]).unwrap();
        let lines: Vec<String> = { said.lines().filter(|line| line.contains("type=")) }
            .map(|line| line.split_once(" : ").unwrap().1.replace(' ', ""))
            .collect();
        assert_eq!(
            lines,
            ["start=2048,size=4096,type=83", "start=6144,size=9,type=ef"]
        );
        assert!(table(&[two[0]; 5]).is_err());
        assert!(table(&[partition(LINUX, 1 << 32, 1)]).is_err());
    }
}
