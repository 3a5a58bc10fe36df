//! State shared by the queues of one disk.

use crate::features::{BLK_F_CONFIG_WCE, BLK_F_FLUSH};
use fathom_core::DiskInfo;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Length of a serial number in bytes (5.2.6, VIRTIO_BLK_T_GET_ID).
pub const SERIAL_LEN: usize = 20;

/// A virtio-blk device.
pub struct BlkDevice {
    info: DiskInfo,
    serial: [u8; SERIAL_LEN],
    queues: u16,
    size: AtomicU64,
    writeback: AtomicBool,
}

impl BlkDevice {
    /// Creates the device for a disk, with up to `queues` queues. Only the first 20 bytes of
    /// `serial` are used.
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

    /// Returns the properties of the disk when the device was created. For the current size, see
    /// [`BlkDevice::size`].
    pub fn info(&self) -> &DiskInfo {
        &self.info
    }

    /// Returns the serial number, padded with zeroes.
    pub fn serial(&self) -> &[u8; SERIAL_LEN] {
        &self.serial
    }

    /// Returns the maximum number of virtqueues that the driver may use.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// Returns the size in bytes; requests beyond it are rejected.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Changes the size of the disk; `size` is a multiple of 512. Queues use the new size from
    /// their next batch. The driver learns it by CONFIG_CHANGE.
    pub fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Returns the configuration's `writeback` field.
    pub fn writeback(&self) -> bool {
        self.writeback.load(Ordering::Acquire)
    }

    /// Sets the configuration's `writeback` field: whether completed writes may be volatile until a
    /// flush.
    pub fn set_writeback(&self, on: bool) {
        self.writeback.store(on, Ordering::Release);
    }

    /// Restores the state that a new driver expects.
    pub fn reset(&self) {
        self.set_writeback(self.info.write_cache);
    }

    /// Returns whether a write must be durable when it completes, for a driver with these features
    /// (5.2.5.2). Writes must be durable if the driver has disabled the cache or cannot flush it.
    pub fn write_through(&self, features: u64) -> bool {
        features & BLK_F_FLUSH == 0 || (features & BLK_F_CONFIG_WCE != 0 && !self.writeback())
    }
}
