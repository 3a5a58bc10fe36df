//! Accesses a request's data across its segments.

use fathom_core::Segments;

/// Copies data from the segments into `out`, beginning at byte `at` of the segments.
///
/// # Safety
/// The segments are valid for reads.
pub(crate) unsafe fn read_at(segments: &Segments, at: usize, out: &mut [u8]) {
    let mut done = 0;
    // SAFETY: each piece lies in its segment, valid as required of the caller, and in `out`.
    each(segments, at, out.len(), |piece, len| unsafe {
        piece.copy_to_nonoverlapping(out[done..done + len].as_mut_ptr(), len);
        done += len;
    });
}

/// Copies `from` into the segments, beginning at byte `at` of the segments.
///
/// # Safety
/// The segments are valid for writes.
pub(crate) unsafe fn write_at(segments: &Segments, at: usize, from: &[u8]) {
    let mut done = 0;
    // SAFETY: as in `read_at`.
    each(segments, at, from.len(), |piece, len| unsafe {
        piece.copy_from_nonoverlapping(from[done..done + len].as_ptr(), len);
        done += len;
    });
}

/// Calls `f` with the pieces of the segments that make up `len` bytes from `at` on, or fewer if the
/// segments end before.
fn each(segments: &Segments, mut at: usize, mut len: usize, mut f: impl FnMut(*mut u8, usize)) {
    for segment in segments {
        if at >= segment.iov_len {
            at -= segment.iov_len;
            continue;
        }
        let n = len.min(segment.iov_len - at);
        f(segment.iov_base.cast::<u8>().wrapping_add(at), n);
        (at, len) = (0, len - n);
        if len == 0 {
            return;
        }
    }
}
