//! The configuration space (5.2.4, struct virtio_blk_config).

use crate::blk_device::BlkDevice;
use crate::request::{MAX_RANGES, SEG_MAX, SIZE_MAX};
use fathom_core::RangeLimits;

/// Length of the configuration in bytes: all fields up to `write_zeroes_may_unmap` and its padding.
pub const CONFIG_LEN: usize = 60;

/// Base of the offsets that cloud-hypervisor sends; QEMU's offsets begin at 0.
const ALIAS: u32 = 0x100;

const CAPACITY: usize = 0;
const SIZE_MAX_AT: usize = 8;
const SEG_MAX_AT: usize = 12;
const BLK_SIZE: usize = 20;
const PHYSICAL_BLOCK_EXP: usize = 24;
const MIN_IO_SIZE: usize = 26;
const OPT_IO_SIZE: usize = 28;
const WRITEBACK: usize = 32;
const NUM_QUEUES: usize = 34;
const MAX_DISCARD_SECTORS: usize = 36;
const MAX_DISCARD_SEG: usize = 40;
const DISCARD_SECTOR_ALIGNMENT: usize = 44;
const MAX_WRITE_ZEROES_SECTORS: usize = 48;
const MAX_WRITE_ZEROES_SEG: usize = 52;
const WRITE_ZEROES_MAY_UNMAP: usize = 56;

const SECTOR: u64 = 512;

/// A write to the configuration space other than a valid write of `writeback`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "the driver wrote {len} bytes to its disk's configuration at {offset:#x}; only writeback can be written"
)]
pub struct ConfigError {
    /// Offset in the configuration space, in bytes.
    pub offset: u32,
    /// Length of the write in bytes.
    pub len: usize,
}

fn origin(offset: u32) -> u32 {
    offset.checked_sub(ALIAS).unwrap_or(offset)
}

/// Returns `len` bytes of the configuration from `offset`, with zeroes beyond its end.
pub fn read(device: &BlkDevice, offset: u32, len: usize) -> Vec<u8> {
    let config = bytes(device);
    let start = (origin(offset) as usize).min(CONFIG_LEN);
    let mut out = config[start..].to_vec();
    out.resize(len, 0);
    out
}

/// Handles a write of the driver to the configuration; only `writeback` can be written.
pub fn write(device: &BlkDevice, offset: u32, data: &[u8]) -> Result<(), ConfigError> {
    match data {
        [on @ (0 | 1)] if origin(offset) as usize == WRITEBACK => {
            device.set_writeback(*on == 1);
            Ok(())
        }
        _ => Err(ConfigError {
            offset,
            len: data.len(),
        }),
    }
}

fn bytes(device: &BlkDevice) -> [u8; CONFIG_LEN] {
    let info = device.info();
    let block = u64::from(info.block_size.max(1));
    let mut config = [0; CONFIG_LEN];
    let mut put = |at: usize, field: &[u8]| config[at..at + field.len()].copy_from_slice(field);
    let blocks = |bytes: u32| u32::try_from(u64::from(bytes) / block).unwrap_or(u32::MAX);
    let physical = blocks(info.physical_block_size).max(1);
    put(CAPACITY, &(device.size() / SECTOR).to_le_bytes());
    put(SIZE_MAX_AT, &SIZE_MAX.to_le_bytes());
    put(SEG_MAX_AT, &(SEG_MAX as u32).to_le_bytes());
    put(BLK_SIZE, &info.block_size.to_le_bytes());
    put(PHYSICAL_BLOCK_EXP, &[physical.ilog2() as u8]);
    put(MIN_IO_SIZE, &(physical.min(0xffff) as u16).to_le_bytes());
    put(OPT_IO_SIZE, &blocks(info.optimal_io_size).to_le_bytes());
    put(WRITEBACK, &[u8::from(device.writeback())]);
    put(NUM_QUEUES, &device.queues().to_le_bytes());
    if let Some(limits) = info.discard {
        put(MAX_DISCARD_SECTORS, &max_sectors(limits).to_le_bytes());
        put(MAX_DISCARD_SEG, &(MAX_RANGES as u32).to_le_bytes());
        let alignment = (u64::from(limits.alignment) / SECTOR).max(1) as u32;
        put(DISCARD_SECTOR_ALIGNMENT, &alignment.to_le_bytes());
    }
    if let Some(limits) = info.write_zeroes {
        put(MAX_WRITE_ZEROES_SECTORS, &max_sectors(limits).to_le_bytes());
        put(MAX_WRITE_ZEROES_SEG, &(MAX_RANGES as u32).to_le_bytes());
        put(WRITE_ZEROES_MAY_UNMAP, &[1]);
    }
    config
}

/// Returns the maximum length of a range in sectors, as announced and as checked.
pub(crate) fn max_sectors(limits: RangeLimits) -> u32 {
    u32::try_from(limits.max_len / SECTOR).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::disk;
    use fathom_core::DiskInfo;

    fn device(change: impl FnOnce(&mut DiskInfo)) -> BlkDevice {
        let mut info = disk();
        change(&mut info);
        BlkDevice::new(info, "", 4)
    }

    fn u32_at(device: &BlkDevice, offset: u32) -> u32 {
        u32::from_le_bytes(read(device, offset, 4).try_into().unwrap())
    }

    #[test]
    fn fields_lie_where_the_specification_puts_them() {
        let device = device(|info| {
            info.size = 3 << 30;
            info.physical_block_size = 4096;
            info.optimal_io_size = 1 << 20;
        });
        assert_eq!(read(&device, 0, 8), (3u64 << 21).to_le_bytes());
        assert_eq!(u32_at(&device, 8), 4 << 20, "size_max");
        assert_eq!(u32_at(&device, 12), 126, "seg_max");
        assert_eq!(read(&device, 16, 4), [0; 4], "geometry");
        assert_eq!(u32_at(&device, 20), 512, "blk_size");
        assert_eq!(read(&device, 24, 2), [3, 0], "2^3 blocks, aligned");
        assert_eq!(read(&device, 26, 2), [8, 0], "min_io_size");
        assert_eq!(u32_at(&device, 28), 2048, "opt_io_size");
        assert_eq!(read(&device, 32, 2), [1, 0], "writeback");
        assert_eq!(read(&device, 34, 2), [4, 0], "num_queues");
        assert_eq!(u32_at(&device, 36), 1 << 21, "max_discard_sectors");
        assert_eq!(u32_at(&device, 40), 1, "max_discard_seg");
        assert_eq!(u32_at(&device, 44), 8, "discard_sector_alignment");
        assert_eq!(u32_at(&device, 48), 1 << 21, "max_write_zeroes_sectors");
        assert_eq!(u32_at(&device, 52), 1, "max_write_zeroes_seg");
        assert_eq!(read(&device, 56, 4), [1, 0, 0, 0], "write_zeroes_may_unmap");
    }

    #[test]
    fn reads_give_exactly_what_was_asked_for() {
        let device = device(|_| ());
        let whole = read(&device, 0, CONFIG_LEN);
        for offset in [0, 1, 20, 59, 60, 61, 0xff, 0x100, 0x120, 0x1000, u32::MAX] {
            for len in [0, 1, 8, 60, 256, 4096] {
                let part = read(&device, offset, len);
                assert_eq!(part.len(), len, "{offset:#x}");
                let start = if offset < 0x100 {
                    offset
                } else {
                    offset - 0x100
                };
                for (i, byte) in part.iter().enumerate() {
                    let expected = whole.get(start as usize + i).copied();
                    assert_eq!(*byte, expected.unwrap_or(0), "{offset:#x} {i}");
                }
            }
        }
    }

    #[test]
    fn what_a_disk_cannot_do_is_left_out() {
        let device = device(|info| {
            info.discard = None;
            info.write_zeroes = None;
            info.write_cache = false;
        });
        assert_eq!(read(&device, 36, 24), [0; 24]);
        assert_eq!(read(&device, 32, 1), [0]);
    }

    #[test]
    fn large_blocks_and_limits_are_expressed_in_their_units() {
        let device = device(|info| {
            info.block_size = 4096;
            info.physical_block_size = 4096;
            info.discard.as_mut().unwrap().max_len = u64::MAX;
        });
        assert_eq!(u32_at(&device, 20), 4096);
        assert_eq!(read(&device, 24, 4), [0, 0, 1, 0]);
        assert_eq!(u32_at(&device, 36), u32::MAX);
    }

    #[test]
    fn only_writeback_can_be_written() {
        let device = device(|_| ());
        assert_eq!(write(&device, 32, &[0]), Ok(()));
        assert!(!device.writeback());
        assert_eq!(write(&device, 0x120, &[1]), Ok(()));
        assert!(device.writeback());
        for (offset, data) in [
            (32, &[2][..]),
            (32, &[0, 0]),
            (32, &[]),
            (31, &[0]),
            (0, &[0]),
        ] {
            assert!(write(&device, offset, data).is_err(), "{offset} {data:?}");
        }
        assert!(device.writeback());
        assert_eq!(device.size(), disk().size);
    }

    #[test]
    fn a_resize_shows() {
        let device = device(|_| ());
        device.set_size(512);
        assert_eq!(read(&device, 0, 8), 1u64.to_le_bytes());
    }
}
