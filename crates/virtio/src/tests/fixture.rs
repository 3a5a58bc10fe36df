//! A queue with its driver, and requests in its memory.

use crate::features::{BLK_F_CONFIG_WCE, BLK_F_FLUSH, RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use crate::request::T_IN;
use crate::testing::{Buffer, Driver, TestMemory, context, finish, pop};
use crate::{BlkDevice, BlkQueue};
use fathom_core::{Cx, DiskInfo, Source};
use std::sync::Arc;

pub const RINGS: u64 = 0x1000;
pub const TABLE: u64 = 0xf000;
pub const HEADER: u64 = 0x1_0000;
pub const DATA: u64 = 0x2_0000;
pub const STATUS: u64 = 0x3_0000;
/// Boundary of two adjacent regions.
pub const SEAM: u64 = 0x8_0000;
/// End of all memory except the regions at high addresses.
pub const END: u64 = 0xa_0000;
/// A region that a request refers to 64 times to reach 1 GiB.
pub const LARGE: u64 = 0x200_0000;
pub const LARGE_LEN: u32 = 0x100_0000;
pub const REGIONS: [(u64, u64); 4] = [
    (0, SEAM),
    (SEAM, END - SEAM),
    (0x100_0000, 0x1000),
    (LARGE, LARGE_LEN as u64),
];

/// Initial contents of `STATUS` and the data.
pub const FILL: u8 = 0xa5;

pub const FEATURES: u64 = RING_F_INDIRECT_DESC | RING_F_EVENT_IDX | BLK_F_FLUSH | BLK_F_CONFIG_WCE;

pub struct Fixture {
    pub memory: TestMemory,
    pub driver: Driver,
    pub device: Arc<BlkDevice>,
    pub queue: BlkQueue,
    pub cx: Cx,
}

impl Fixture {
    pub fn new(disk: DiskInfo, features: u64) -> Fixture {
        Fixture::with_size(disk, features, 16)
    }

    pub fn with_size(disk: DiskInfo, features: u64, size: u16) -> Fixture {
        let memory = TestMemory::new(&REGIONS);
        let driver = Driver::new(&memory, RINGS, size, features & RING_F_EVENT_IDX != 0);
        let device = Arc::new(BlkDevice::new(disk, "a serial number", 1));
        let queue = BlkQueue::new(
            driver.setup(features),
            memory.guest().clone(),
            None,
            None,
            device.clone(),
        );
        Fixture {
            memory,
            driver,
            device,
            queue: queue.expect("a good queue"),
            cx: context(usize::from(size)),
        }
    }

    pub fn header(&self, kind: u32, sector: u64) {
        self.memory.write(HEADER, &header(kind, sector));
    }

    /// Makes one chain available.
    pub fn offer(&mut self, indirect: bool, buffers: &[Buffer]) {
        if indirect {
            self.driver.put_indirect(0, TABLE, buffers);
        } else {
            self.driver.put_direct(0, buffers);
        }
        self.driver.offer(0);
        self.driver.publish();
    }
}

/// Returns the device-readable part of struct virtio_blk_req.
pub fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// Returns a struct virtio_blk_discard_write_zeroes.
pub fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}

/// Returns the chain of a read of the first sector.
pub fn read_chain() -> [Buffer; 3] {
    [
        Buffer::readable(HEADER, 16),
        Buffer::writable(DATA, 512),
        Buffer::writable(STATUS, 1),
    ]
}

/// Serves `n` reads in one batch. Returns whether the driver wants an interrupt.
pub fn serve(f: &mut Fixture, n: u16) -> bool {
    f.header(T_IN, 0);
    f.driver.put_indirect(0, TABLE, &read_chain());
    (0..n).for_each(|_| f.driver.offer(0));
    f.driver.publish();
    let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
    assert_eq!(popped.len(), usize::from(n));
    finish(&mut f.queue, &mut f.cx, &popped, 0);
    f.queue.publish(&mut f.cx)
}
