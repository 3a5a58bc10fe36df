//! Limits of bitmaps.

use crate::blocks::block_of;

/// Maximum number of bitmaps of a disk; each adds a small cost to every write.
pub(super) const MOST: usize = 16;
/// Maximum length of a name in bytes.
const LONGEST_NAME: usize = 64;

/// Minimum and maximum bytes per bit.
pub(super) const LEAST_GRANULARITY: u64 = 512;
pub(super) const MOST_GRANULARITY: u64 = 1 << 31;
/// Maximum number of bits of a bitmap.
pub(super) const MOST_BITS: u64 = 1 << 28;

/// Returns the default number of bytes per bit.
pub(super) fn granularity(size: u64) -> u64 {
    block_of(size)
}

/// Returns whether a bitmap of a disk of `size` bytes may have this granularity.
pub(super) fn is_granularity(size: u64, block: u64) -> bool {
    block.is_power_of_two()
        && (LEAST_GRANULARITY..=MOST_GRANULARITY).contains(&block)
        && size.div_ceil(block) <= MOST_BITS
}

/// Checks a bitmap's name, which must fit into a URI and a path without quoting.
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
