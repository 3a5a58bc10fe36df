//! Where the fields of a header of version 1 are (LUKS1 spec, figures 1 and 2).

pub const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Offset of the version, of 16 bits; the same in version 2.
pub const VERSION: usize = 6;
pub const CIPHER: usize = 8;
pub const MODE: usize = 40;
pub const HASH: usize = 72;
/// Bytes of each of the three names.
pub const NAME: usize = 32;
/// In units of 512 bytes, as is [`SLOT_MATERIAL`].
pub const PAYLOAD: usize = 104;
pub const KEY_BYTES: usize = 108;
pub const DIGEST: usize = 112;
pub const DIGEST_LEN: usize = 20;
pub const DIGEST_SALT: usize = 132;
pub const DIGEST_ITERATIONS: usize = 164;
pub const UUID: usize = 168;
pub const UUID_LEN: usize = 40;
pub const SLOTS: usize = 208;
/// Bytes of all fields.
pub const LEN: usize = 592;
/// Bytes before which no key material may be.
pub const RESERVED: u64 = 1024;

/// How many slots there are.
pub const SLOT_COUNT: u32 = 8;
/// Bytes of a slot's fields.
pub const SLOT_LEN: usize = 48;
/// Offsets in a slot's fields.
pub const SLOT_ITERATIONS: usize = 4;
pub const SLOT_SALT: usize = 8;
pub const SLOT_MATERIAL: usize = 40;
pub const SLOT_STRIPES: usize = 44;
/// What a slot's first field says.
pub const ACTIVE: u32 = 0x00ac_71f3;
pub const INACTIVE: u32 = 0x0000_dead;

/// Where the fields of a slot are.
pub const fn slot(number: u32) -> usize {
    SLOTS + number as usize * SLOT_LEN
}
