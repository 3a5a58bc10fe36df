//! The segments of the data that a system call receives or sends.

use fathom_core::segments::pieces;
use libc::iovec;

/// Appends the iovecs of `len` bytes of the segments from `start` on, until `out` has `limit` of
/// them. Returns the number of bytes covered.
pub(super) fn gather(
    segments: &[iovec],
    start: u64,
    len: u64,
    limit: usize,
    out: &mut Vec<iovec>,
) -> u64 {
    let mut covered = 0;
    let room = limit.saturating_sub(out.len());
    for piece in pieces(segments, start..start + len).take(room) {
        covered += piece.iov_len as u64;
        out.push(piece);
    }
    covered
}
