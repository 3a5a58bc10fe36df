//! Feature bits, and which of them a disk offers.

use fathom_core::DiskInfo;

/// Any single segment is at most `size_max` bytes (5.2.3).
pub const BLK_F_SIZE_MAX: u64 = 1 << 1;
/// A request has at most `seg_max` segments (5.2.3).
pub const BLK_F_SEG_MAX: u64 = 1 << 2;
/// The disk rejects writes (5.2.3).
pub const BLK_F_RO: u64 = 1 << 5;
/// `blk_size` is the logical block size (5.2.3).
pub const BLK_F_BLK_SIZE: u64 = 1 << 6;
/// The device supports the flush command (5.2.3).
pub const BLK_F_FLUSH: u64 = 1 << 9;
/// `topology` describes the best alignment of I/O (5.2.3).
pub const BLK_F_TOPOLOGY: u64 = 1 << 10;
/// The driver can switch between write-back and write-through (5.2.3).
pub const BLK_F_CONFIG_WCE: u64 = 1 << 11;
/// The device has `num_queues` queues (5.2.3).
pub const BLK_F_MQ: u64 = 1 << 12;
/// The device supports the discard command (5.2.3).
pub const BLK_F_DISCARD: u64 = 1 << 13;
/// The device supports the write-zeroes command (5.2.3).
pub const BLK_F_WRITE_ZEROES: u64 = 1 << 14;

/// The device logs all guest memory that it writes (vhost-user, "Migration").
pub const VHOST_F_LOG_ALL: u64 = 1 << 26;
/// Descriptors may refer to tables of descriptors (2.7.5.3).
pub const RING_F_INDIRECT_DESC: u64 = 1 << 28;
/// `used_event` and `avail_event` are in use (2.7.10).
pub const RING_F_EVENT_IDX: u64 = 1 << 29;
/// The protocol features of vhost-user can be negotiated (vhost-user, "VHOST_USER_GET_FEATURES").
pub const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Not a legacy device (6).
pub const F_VERSION_1: u64 = 1 << 32;
/// Addresses of the device go through an IOMMU of the guest (6.1). Not supported.
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;
/// The queues are packed (2.8).
pub const F_RING_PACKED: u64 = 1 << 34;

/// Features that depend on the abilities and permissions of the disk.
pub const OF_DISK: u64 = BLK_F_RO | BLK_F_CONFIG_WCE | BLK_F_DISCARD | BLK_F_WRITE_ZEROES;

/// Returns the features that a disk with up to `queues` queues offers its driver.
///
/// Packed queues are an option of the export. VIRTIO_F_IN_ORDER is not offered: requests complete
/// in the order in which the storage finishes them, and a request would have to wait for all
/// earlier ones. VIRTIO_F_ACCESS_PLATFORM is not offered: the device has no IOTLB, and takes
/// addresses in descriptors as guest physical addresses.
pub fn offered(info: &DiskInfo, queues: u16) -> u64 {
    // FLUSH is offered on read-only disks, too, since drivers may send flushes (5.2.6.2).
    let always = F_VERSION_1
        | RING_F_INDIRECT_DESC
        | RING_F_EVENT_IDX
        | VHOST_F_LOG_ALL
        | VHOST_USER_F_PROTOCOL_FEATURES
        | BLK_F_SIZE_MAX
        | BLK_F_SEG_MAX
        | BLK_F_BLK_SIZE
        | BLK_F_TOPOLOGY
        | BLK_F_FLUSH;
    let writable = |bits: u64| if info.read_only { 0 } else { bits };
    let when = |condition: bool, bits: u64| if condition { bits } else { 0 };
    always
        | when(info.read_only, BLK_F_RO)
        | when(queues > 1, BLK_F_MQ)
        | writable(BLK_F_CONFIG_WCE)
        | writable(when(info.discard.is_some(), BLK_F_DISCARD))
        | writable(when(info.write_zeroes.is_some(), BLK_F_WRITE_ZEROES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::disk;

    #[test]
    fn a_disk_offers_what_it_can_do() {
        let mut info = disk();
        let everything = offered(&info, 2);
        for bit in [1, 2, 6, 9, 10, 11, 12, 13, 14, 26, 28, 29, 30, 32] {
            assert_ne!(everything & 1 << bit, 0, "feature {bit}");
        }
        assert_eq!(everything.count_ones(), 14);
        assert_eq!(everything & !offered(&info, 1), BLK_F_MQ);
        info.discard = None;
        info.write_zeroes = None;
        let rest = everything & !BLK_F_DISCARD & !BLK_F_WRITE_ZEROES;
        assert_eq!(offered(&info, 2), rest);
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_writes() {
        let mut info = disk();
        info.read_only = true;
        let features = offered(&info, 1);
        assert_ne!(features & BLK_F_RO, 0);
        assert_ne!(features & BLK_F_FLUSH, 0);
        let writing = BLK_F_CONFIG_WCE | BLK_F_DISCARD | BLK_F_WRITE_ZEROES;
        assert_eq!(features & writing, 0);
    }
}
