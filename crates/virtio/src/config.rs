//! The configuration space (5.2.4, struct virtio_blk_config).

use crate::blk_device::BlkDevice;
use crate::request::{MAX_RANGES, SEG_MAX, SIZE_MAX};
use fathom_core::RangeLimits;

/// Bytes that we know of: all up to `write_zeroes_may_unmap` and its padding.
pub const CONFIG_LEN: usize = 60;

/// cloud-hypervisor counts offsets from here, QEMU from 0.
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

/// A write to the configuration space that is not one of `writeback`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "the driver wrote {len} bytes to its disk's configuration at {offset:#x}; only writeback can be written"
)]
pub struct ConfigError {
    pub offset: u32,
    pub len: usize,
}

fn origin(offset: u32) -> u32 {
    offset.checked_sub(ALIAS).unwrap_or(offset)
}

/// Exactly `len` bytes of the configuration from `offset` on, zeroes where it
/// has ended.
pub fn read(device: &BlkDevice, offset: u32, len: usize) -> Vec<u8> {
    let config = bytes(device);
    let start = (origin(offset) as usize).min(CONFIG_LEN);
    let mut out = config[start..].to_vec();
    out.resize(len, 0);
    out
}

/// The driver writes to the configuration; only `writeback` can be written.
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

/// The longest range, as announced and as checked.
pub(crate) fn max_sectors(limits: RangeLimits) -> u32 {
    u32::try_from(limits.max_len / SECTOR).unwrap_or(u32::MAX)
}
