//! Feature bits and the configuration space of virtio-blk (virtio 1.2, 5.2).

use serde::Serialize;

/// A feature bit and its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    bit: u32,
    name: &'static str,
}

impl Feature {
    pub const SIZE_MAX: Feature = Feature::new(1, "SIZE_MAX");
    pub const SEG_MAX: Feature = Feature::new(2, "SEG_MAX");
    pub const RO: Feature = Feature::new(5, "RO");
    pub const BLK_SIZE: Feature = Feature::new(6, "BLK_SIZE");
    pub const FLUSH: Feature = Feature::new(9, "FLUSH");
    pub const TOPOLOGY: Feature = Feature::new(10, "TOPOLOGY");
    pub const CONFIG_WCE: Feature = Feature::new(11, "CONFIG_WCE");
    pub const MQ: Feature = Feature::new(12, "MQ");
    pub const DISCARD: Feature = Feature::new(13, "DISCARD");
    pub const WRITE_ZEROES: Feature = Feature::new(14, "WRITE_ZEROES");
    pub const LOG_ALL: Feature = Feature::new(26, "LOG_ALL");
    pub const INDIRECT_DESC: Feature = Feature::new(28, "INDIRECT_DESC");
    pub const EVENT_IDX: Feature = Feature::new(29, "EVENT_IDX");
    pub const PROTOCOL_FEATURES: Feature = Feature::new(30, "PROTOCOL_FEATURES");
    pub const VERSION_1: Feature = Feature::new(32, "VERSION_1");
    pub const RING_PACKED: Feature = Feature::new(34, "RING_PACKED");

    const NAMED: [Feature; 16] = [
        Feature::SIZE_MAX,
        Feature::SEG_MAX,
        Feature::RO,
        Feature::BLK_SIZE,
        Feature::FLUSH,
        Feature::TOPOLOGY,
        Feature::CONFIG_WCE,
        Feature::MQ,
        Feature::DISCARD,
        Feature::WRITE_ZEROES,
        Feature::LOG_ALL,
        Feature::INDIRECT_DESC,
        Feature::EVENT_IDX,
        Feature::PROTOCOL_FEATURES,
        Feature::VERSION_1,
        Feature::RING_PACKED,
    ];

    const fn new(bit: u32, name: &'static str) -> Feature {
        Feature { bit, name }
    }

    /// Returns the mask of the bit.
    pub const fn mask(self) -> u64 {
        1 << self.bit
    }

    /// Returns whether `features` contains this bit.
    pub const fn is_in(self, features: u64) -> bool {
        features & self.mask() != 0
    }

    /// Returns the name in the specification, without prefix.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// Returns the names of all set bits. Unknown bits are named `bitN`.
    pub fn names(features: u64) -> Vec<String> {
        let name = |bit: u32| {
            let known = Feature::NAMED.iter().find(|f| f.bit == bit);
            known.map_or_else(|| format!("bit{bit}"), |f| f.name.to_owned())
        };
        (0..64)
            .filter(|b| features & (1 << b) != 0)
            .map(name)
            .collect()
    }
}

/// `struct virtio_blk_config`, up to the write-zeroes fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockConfig {
    /// Capacity in 512-byte sectors.
    pub capacity: u64,
    pub size_max: u32,
    pub seg_max: u32,
    pub blk_size: u32,
    pub physical_block_exp: u8,
    pub alignment_offset: u8,
    pub min_io_size: u16,
    pub opt_io_size: u32,
    pub writeback: u8,
    pub num_queues: u16,
    pub max_discard_sectors: u32,
    pub max_discard_seg: u32,
    pub discard_sector_alignment: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_write_zeroes_seg: u32,
    pub write_zeroes_may_unmap: u8,
}

impl BlockConfig {
    /// Number of bytes to read from the configuration space. Every server since 2018 provides them.
    pub const LEN: usize = 60;

    /// Parses the little-endian fields. Missing bytes count as zero.
    pub fn parse(bytes: &[u8]) -> BlockConfig {
        let mut b = [0u8; BlockConfig::LEN];
        let n = bytes.len().min(b.len());
        b[..n].copy_from_slice(&bytes[..n]);
        let u16_at = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        BlockConfig {
            capacity: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            size_max: u32_at(8),
            seg_max: u32_at(12),
            blk_size: u32_at(20),
            physical_block_exp: b[24],
            alignment_offset: b[25],
            min_io_size: u16_at(26),
            opt_io_size: u32_at(28),
            writeback: b[32],
            num_queues: u16_at(34),
            max_discard_sectors: u32_at(36),
            max_discard_seg: u32_at(40),
            discard_sector_alignment: u32_at(44),
            max_write_zeroes_sectors: u32_at(48),
            max_write_zeroes_seg: u32_at(52),
            write_zeroes_may_unmap: b[56],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_space_is_read_at_the_specified_offsets() {
        let bytes: Vec<u8> = (0..60).collect();
        let c = BlockConfig::parse(&bytes);
        assert_eq!(c.capacity, 0x0706_0504_0302_0100);
        assert_eq!((c.size_max, c.seg_max), (0x0b0a_0908, 0x0f0e_0d0c));
        assert_eq!(c.blk_size, 0x1716_1514);
        assert_eq!(c.num_queues, 0x2322);
        assert_eq!(c.max_discard_sectors, 0x2726_2524);
        assert_eq!(c.write_zeroes_may_unmap, 56);
        assert_eq!(BlockConfig::parse(&bytes[..8]).size_max, 0);
    }

    #[test]
    fn features_have_their_names() {
        let f = Feature::RO.mask() | Feature::EVENT_IDX.mask() | 1 << 40;
        assert_eq!(Feature::names(f), ["RO", "EVENT_IDX", "bit40"]);
    }
}
