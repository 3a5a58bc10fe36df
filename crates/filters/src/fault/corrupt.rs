//! Corrupts the data of reads.

use super::cache::SECTOR;
use super::choice::Choice;
use crate::random::mix;
use crate::segments::{read_at, write_at};
use fathom_core::Request;

/// Flips one bit in each sector of a read that `choice` selects. The bit is always the same for the
/// same sector.
pub(super) fn corrupt(choice: &Choice, request: &Request) {
    let first = request.offset / SECTOR as u64;
    for n in 0..request.len / SECTOR as u64 {
        if !choice.takes_sector(first + n) {
            continue;
        }
        let bit = mix(choice.seed() ^ mix(first + n)) as usize % (SECTOR * 8);
        let at = n as usize * SECTOR + bit / 8;
        let mut byte = [0];
        // SAFETY: the source guarantees that its segments are valid, and the read has ended.
        unsafe {
            read_at(&request.segments, at, &mut byte);
            write_at(&request.segments, at, &[byte[0] ^ 1 << (bit % 8)]);
        }
    }
}
