//! Options, replies to options, and properties of an export (proto.md, "Handshake phase").

use super::{OPTION_MAGIC, OPTION_REPLY_MAGIC, info, u16_at, u32_at, u64_at};

/// An option's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// See [`opt`](super::opt).
    pub option: u32,
    /// Number of bytes of data that follow.
    pub len: u32,
}

impl OptionHeader {
    /// Length of the header in bytes.
    pub const LEN: usize = 16;

    /// Parses a header. Returns `None` if the magic number is wrong.
    pub fn parse(bytes: &[u8; OptionHeader::LEN]) -> Option<OptionHeader> {
        (u64_at(bytes, 0) == OPTION_MAGIC).then(|| OptionHeader {
            option: u32_at(bytes, 8),
            len: u32_at(bytes, 12),
        })
    }

    /// Returns the header as it is sent, with the magic number.
    pub fn to_bytes(self) -> [u8; OptionHeader::LEN] {
        let mut bytes = [0; OptionHeader::LEN];
        bytes[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.option.to_be_bytes());
        bytes[12..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }
}

/// The header of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option to which this is a reply.
    pub option: u32,
    /// See [`rep`](super::rep).
    pub kind: u32,
    /// Number of bytes of data that follow.
    pub len: u32,
}

impl OptionReplyHeader {
    /// Length of the header in bytes.
    pub const LEN: usize = 20;

    /// Parses a header. Returns `None` if the magic number is wrong.
    pub fn parse(bytes: &[u8; OptionReplyHeader::LEN]) -> Option<OptionReplyHeader> {
        (u64_at(bytes, 0) == OPTION_REPLY_MAGIC).then(|| OptionReplyHeader {
            option: u32_at(bytes, 8),
            kind: u32_at(bytes, 12),
            len: u32_at(bytes, 16),
        })
    }

    /// Returns the header as it is sent, with the magic number.
    pub fn to_bytes(self) -> [u8; OptionReplyHeader::LEN] {
        let mut bytes = [0; OptionReplyHeader::LEN];
        bytes[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.option.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.kind.to_be_bytes());
        bytes[16..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }
}

/// The data of NBD_INFO_EXPORT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size of the export in bytes.
    pub size: u64,
    /// See [`export_flag`](super::export_flag).
    pub flags: u16,
}

impl ExportInfo {
    const LEN: usize = 12;

    /// Returns the data as it is sent, with the type [`info::EXPORT`].
    pub fn to_bytes(self) -> [u8; ExportInfo::LEN] {
        let mut bytes = [0; ExportInfo::LEN];
        bytes[..2].copy_from_slice(&info::EXPORT.to_be_bytes());
        bytes[2..10].copy_from_slice(&self.size.to_be_bytes());
        bytes[10..].copy_from_slice(&self.flags.to_be_bytes());
        bytes
    }
}

/// The data of NBD_INFO_BLOCK_SIZE, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Unit of offsets and lengths: the client sends only multiples of this size.
    pub minimum: u32,
    /// Size below which requests are inefficient.
    pub preferred: u32,
    /// Maximum length of the payload of a request or reply.
    pub maximum: u32,
}

impl BlockSizes {
    const LEN: usize = 14;

    /// Returns the data as it is sent, with the type [`info::BLOCK_SIZE`].
    pub fn to_bytes(self) -> [u8; BlockSizes::LEN] {
        let mut bytes = [0; BlockSizes::LEN];
        bytes[..2].copy_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        bytes[2..6].copy_from_slice(&self.minimum.to_be_bytes());
        bytes[6..10].copy_from_slice(&self.preferred.to_be_bytes());
        bytes[10..].copy_from_slice(&self.maximum.to_be_bytes());
        bytes
    }
}

/// The data of an NBD_REP_INFO; types that nothing here uses are `Other`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Info {
    /// Size and flags of the export (NBD_INFO_EXPORT).
    Export(ExportInfo),
    /// Limits for the sizes of requests (NBD_INFO_BLOCK_SIZE).
    BlockSizes(BlockSizes),
    /// Information of another type, which the receiver ignores.
    Other,
}

impl Info {
    /// Parses the data. Returns `None` if the length is wrong.
    pub fn parse(data: &[u8]) -> Option<Info> {
        let kind = u16::from_be_bytes(*data.first_chunk()?);
        match (kind, data.len()) {
            (info::EXPORT, ExportInfo::LEN) => Some(Info::Export(ExportInfo {
                size: u64_at(data, 2),
                flags: u16_at(data, 10),
            })),
            (info::BLOCK_SIZE, BlockSizes::LEN) => Some(Info::BlockSizes(BlockSizes {
                minimum: u32_at(data, 2),
                preferred: u32_at(data, 6),
                maximum: u32_at(data, 10),
            })),
            (info::EXPORT | info::BLOCK_SIZE, _) => None,
            _ => Some(Info::Other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infos_have_the_length_that_they_should() {
        let export = ExportInfo {
            size: 0x0102_0304_0506_0708,
            flags: 0x090a,
        };
        let blocks = BlockSizes {
            minimum: 512,
            preferred: 4096,
            maximum: 32 << 20,
        };
        assert_eq!(
            export.to_bytes(),
            *b"\0\0\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a"
        );
        assert_eq!(blocks.to_bytes(), *b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0");
        for (bytes, info) in [
            (&export.to_bytes()[..], Info::Export(export)),
            (&blocks.to_bytes()[..], Info::BlockSizes(blocks)),
        ] {
            assert_eq!(Info::parse(bytes), Some(info));
            assert_eq!(Info::parse(&[bytes, b"x"].concat()), None);
            for len in 0..bytes.len() {
                assert_eq!(Info::parse(&bytes[..len]), None, "{len} bytes");
            }
        }
        assert_eq!(Info::parse(b"\0\x01name"), Some(Info::Other));
    }
}
