//! What bitmaps there may be.

use crate::blocks::block_of;

/// So many bitmaps a disk may have: each costs a little with every change.
pub(super) const MOST: usize = 16;
/// Bytes of a name.
const LONGEST_NAME: usize = 64;

/// What a bit may stand for (bytes).
pub(super) const LEAST_GRANULARITY: u64 = 512;
pub(super) const MOST_GRANULARITY: u64 = 1 << 31;
/// Bits that a bitmap may have.
pub(super) const MOST_BITS: u64 = 1 << 28;

/// Bytes that a bit stands for, if nobody says it.
pub(super) fn granularity(size: u64) -> u64 {
    block_of(size)
}

/// Whether a bit may stand for so many bytes of such a disk.
pub(super) fn is_granularity(size: u64, block: u64) -> bool {
    block.is_power_of_two()
        && (LEAST_GRANULARITY..=MOST_GRANULARITY).contains(&block)
        && size.div_ceil(block) <= MOST_BITS
}

/// Whether it is the name of a bitmap: a part of a URI and of a path, without being quoted.
pub fn check_bitmap_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_name = (1..=LONGEST_NAME).contains(&name.len())
        && name.bytes().all(is_plain)
        && !name.starts_with('.');
    match is_name {
        true => Ok(()),
        false => Err(format!(
            "'{name}' is not a bitmap's name, which has 1 to {LONGEST_NAME} letters, digits, \
             '-', '_' and '.', not beginning with '.'"
        )),
    }
}
