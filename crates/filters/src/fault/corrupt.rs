//! Corrupts the data of reads.

use super::cache::SECTOR;
use super::choice::{Choice, History};
use crate::random::mix;
use fathom_core::Request;
use fathom_core::segments::{read_at, write_at};

/// Flips one bit in each sector of a read that `choice` selects. The bit is always the same for the
/// same sector. `is_counted`: the history includes the request already.
pub(super) fn corrupt(choice: &Choice, history: &History, request: &Request, is_counted: bool) {
    if !choice.takes_sectors_of(history, request, is_counted) {
        return;
    }
    let first = request.offset / SECTOR as u64;
    for n in 0..request.len / SECTOR as u64 {
        if !choice.takes_sector(history, first + n) {
            continue;
        }
        let bit = mix(choice.seed() ^ mix(first + n)) as usize % (SECTOR * 8);
        let at = n * SECTOR as u64 + bit as u64 / 8;
        let mut byte = [0];
        // SAFETY: the source guarantees that its segments are valid, and the read has ended.
        unsafe {
            read_at(&request.segments, at, &mut byte);
            write_at(&request.segments, at, &[byte[0] ^ 1 << (bit % 8)]);
        }
    }
}
