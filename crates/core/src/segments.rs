//! Access to parts of a request's segments. Offsets are in bytes from the start of the first
//! segment.

use libc::iovec;
use std::ops::Range;

const ZEROES_LEN: usize = 64 << 10;

/// The source of zeroes that are written; aligned for direct I/O.
#[repr(align(4096))]
struct Zeroes([u8; ZEROES_LEN]);
static ZEROES: Zeroes = Zeroes([0; ZEROES_LEN]);

/// Returns the pieces of the segments that make up `range`, none of them empty. The pieces end
/// earlier if the segments do.
#[inline]
pub fn pieces(segments: &[iovec], range: Range<u64>) -> impl Iterator<Item = iovec> + '_ {
    let mut start = 0;
    let piece = move |segment: &iovec| {
        let end = start + segment.iov_len as u64;
        let (from, to) = (range.start.max(start), range.end.min(end));
        let skipped = from.saturating_sub(start) as usize;
        start = end;
        (from < to).then(|| iovec {
            iov_base: segment.iov_base.wrapping_byte_add(skipped),
            iov_len: (to - from) as usize,
        })
    };
    segments.iter().filter_map(piece)
}

/// Returns segments from which `len` zeroes can be written.
pub fn zeroes(len: u64) -> impl Iterator<Item = iovec> {
    let piece = move |start: u64| iovec {
        iov_base: ZEROES.0.as_ptr().cast_mut().cast(),
        iov_len: (len - start).min(ZEROES_LEN as u64) as usize,
    };
    (0..len).step_by(ZEROES_LEN).map(piece)
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the memory to the segments.
    ToSegments,
    /// From the segments to the memory.
    FromSegments,
}

/// Copies between `memory` and the bytes of `segments` from `at` on, until either ends.
///
/// # Safety
/// The memory and all segments are valid and do not overlap.
pub unsafe fn copy(memory: iovec, segments: &[iovec], at: u64, direction: Direction) {
    let mut mine = memory.iov_base.cast::<u8>();
    for piece in pieces(segments, at..at + memory.iov_len as u64) {
        let theirs = piece.iov_base.cast::<u8>();
        // SAFETY: the piece lies in a segment. All pieces together are not longer than the memory.
        unsafe {
            match direction {
                Direction::ToSegments => mine.copy_to_nonoverlapping(theirs, piece.iov_len),
                Direction::FromSegments => theirs.copy_to_nonoverlapping(mine, piece.iov_len),
            }
            mine = mine.add(piece.iov_len);
        }
    }
}

/// Copies the bytes of `segments` from `at` on to `out`.
///
/// # Safety
/// All segments are valid for reads.
pub unsafe fn read_at(segments: &[iovec], at: u64, out: &mut [u8]) {
    let memory = iovec {
        iov_base: out.as_mut_ptr().cast(),
        iov_len: out.len(),
    };
    // SAFETY: as required of the caller; an exclusive reference does not overlap them.
    unsafe { copy(memory, segments, at, Direction::FromSegments) };
}

/// Copies `bytes` to `segments` from `at` on.
///
/// # Safety
/// All segments are valid for writes, and none overlaps `bytes`.
pub unsafe fn write_at(segments: &[iovec], at: u64, bytes: &[u8]) {
    let memory = iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: as required of the caller; the memory is only read.
    unsafe { copy(memory, segments, at, Direction::ToSegments) };
}

/// Fills the bytes `range` of `segments` with zeroes.
///
/// # Safety
/// All segments are valid for writes.
pub unsafe fn clear(segments: &[iovec], range: Range<u64>) {
    for piece in pieces(segments, range) {
        // SAFETY: the piece lies in a segment.
        unsafe { piece.iov_base.cast::<u8>().write_bytes(0, piece.iov_len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_copies_and_zeroes_reach_the_right_bytes(
            lens in prop::collection::vec(0usize..40, 1..8),
            start in 0usize..200,
            len in 0usize..200,
        ) {
            let total: usize = lens.iter().sum();
            let mut guest: Vec<u8> = (0..total).map(|i| i as u8 | 1).collect();
            let base = guest.as_mut_ptr();
            let mut at = 0;
            let segments: Vec<iovec> = lens.iter().map(|&len| {
                let segment = iovec { iov_base: base.wrapping_add(at).cast(), iov_len: len };
                at += len;
                segment
            }).collect();
            let inside = start.min(total)..(start + len).min(total);
            let range = start as u64..(start + len) as u64;
            let found: Vec<usize> = pieces(&segments, range.clone())
                .flat_map(|piece| {
                    assert!(piece.iov_len > 0);
                    let first = piece.iov_base as usize - base as usize;
                    first..first + piece.iov_len
                })
                .collect();
            prop_assert_eq!(found, inside.clone().collect::<Vec<_>>());

            let mut out = vec![0; len];
            // SAFETY: the segments lie in `guest`.
            unsafe { read_at(&segments, start as u64, &mut out) };
            prop_assert_eq!(&out[..inside.len()], &guest[inside.clone()]);
            prop_assert!(out[inside.len()..].iter().all(|byte| *byte == 0));

            let before = guest.clone();
            let is_changed = |guest: &[u8], to: u8| {
                let mut expected = before.clone();
                expected[inside.clone()].fill(to);
                guest == expected
            };
            // SAFETY: the segments lie in `guest`.
            unsafe { write_at(&segments, start as u64, &vec![0xee; len]) };
            prop_assert!(is_changed(&guest, 0xee));
            // SAFETY: the segments lie in `guest`.
            unsafe { clear(&segments, range) };
            prop_assert!(is_changed(&guest, 0));
        }
    }

    #[test]
    fn zeroes_have_the_requested_length() {
        for len in [0, 1, 4096, 65536, 65537, 1 << 20] {
            assert_eq!(
                zeroes(len).map(|piece| piece.iov_len as u64).sum::<u64>(),
                len
            );
        }
    }
}
