//! What the queues of one disk have in common.

use crate::features::{BLK_F_CONFIG_WCE, BLK_F_FLUSH};
use fathom_core::DiskInfo;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Length of a serial number (5.2.6, VIRTIO_BLK_T_GET_ID).
pub const SERIAL_LEN: usize = 20;

/// One virtio-blk device.
pub struct BlkDevice {
    info: DiskInfo,
    serial: [u8; SERIAL_LEN],
    queues: u16,
    size: AtomicU64,
    writeback: AtomicBool,
}

impl BlkDevice {
    /// A device for a disk, with up to `queues` queues. Of `serial`, the
    /// first 20 bytes count.
    pub fn new(info: DiskInfo, serial: &str, queues: u16) -> BlkDevice {
        let mut bytes = [0; SERIAL_LEN];
        let len = serial.len().min(SERIAL_LEN);
        bytes[..len].copy_from_slice(&serial.as_bytes()[..len]);
        BlkDevice {
            size: AtomicU64::new(info.size),
            writeback: AtomicBool::new(info.write_cache),
            serial: bytes,
            queues,
            info,
        }
    }

    /// The disk as it was when the device was made; for its size, see
    /// [`BlkDevice::size`].
    pub fn info(&self) -> &DiskInfo {
        &self.info
    }

    /// Padded with zeroes.
    pub fn serial(&self) -> &[u8; SERIAL_LEN] {
        &self.serial
    }

    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// Bytes; requests beyond are refused.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Resize the disk; `size` is a multiple of 512. Queues see it with
    /// their next batch. The driver learns of it by CONFIG_CHANGE.
    pub fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// The configuration's `writeback` field.
    pub fn writeback(&self) -> bool {
        self.writeback.load(Ordering::Acquire)
    }

    pub fn set_writeback(&self, on: bool) {
        self.writeback.store(on, Ordering::Release);
    }

    /// What a new driver finds.
    pub fn reset(&self) {
        self.set_writeback(self.info.write_cache);
    }

    /// Whether a write must be durable when it completes, for a driver with
    /// these features (5.2.5.2): it has switched the cache off, or cannot
    /// flush it.
    pub fn write_through(&self, features: u64) -> bool {
        features & BLK_F_FLUSH == 0 || (features & BLK_F_CONFIG_WCE != 0 && !self.writeback())
    }
}
