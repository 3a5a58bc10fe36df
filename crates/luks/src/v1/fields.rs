//! Offsets of the fields in a version 1 header (LUKS1 specification, figures 1 and 2).

pub const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Offset of the 16-bit version field; the same in version 2.
pub const VERSION: usize = 6;
pub const CIPHER: usize = 8;
pub const MODE: usize = 40;
pub const HASH: usize = 72;
/// Size in bytes of each of the three name fields: cipher, mode and hash.
pub const NAME: usize = 32;
/// Offset of the payload's start, which is in units of 512 bytes, as is [`SLOT_MATERIAL`].
pub const PAYLOAD: usize = 104;
pub const KEY_BYTES: usize = 108;
pub const DIGEST: usize = 112;
pub const DIGEST_LEN: usize = 20;
pub const DIGEST_SALT: usize = 132;
pub const DIGEST_ITERATIONS: usize = 164;
pub const UUID: usize = 168;
pub const UUID_LEN: usize = 40;
pub const SLOTS: usize = 208;
/// Total size of all fields in bytes.
pub const LEN: usize = 592;
/// Size in bytes of the start of the disk that must not contain key material.
pub const RESERVED: u64 = 1024;

/// Number of key slots.
pub const SLOT_COUNT: u32 = 8;
/// Size of a slot's fields in bytes.
pub const SLOT_LEN: usize = 48;
/// Offset of the iteration count within a slot; the constants below are further such offsets.
pub const SLOT_ITERATIONS: usize = 4;
pub const SLOT_SALT: usize = 8;
pub const SLOT_MATERIAL: usize = 40;
pub const SLOT_STRIPES: usize = 44;
/// Value of a slot's first field if the slot is in use.
pub const ACTIVE: u32 = 0x00ac_71f3;
pub const INACTIVE: u32 = 0x0000_dead;

/// Returns the offset of a slot's fields.
pub const fn slot(number: u32) -> usize {
    SLOTS + number as usize * SLOT_LEN
}
