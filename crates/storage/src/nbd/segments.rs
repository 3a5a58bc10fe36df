//! Accesses byte ranges of a request's segments.

use libc::iovec;

/// Appends the iovecs of `len` bytes from `start` on, until `out` has `limit` of them. Returns the
/// number of bytes covered.
pub(super) fn gather(
    segments: &[iovec],
    start: u64,
    len: u64,
    limit: usize,
    out: &mut Vec<iovec>,
) -> u64 {
    let mut left = len;
    let mut skip = start;
    for segment in segments {
        let size = segment.iov_len as u64;
        if skip >= size {
            skip -= size;
            continue;
        }
        if left == 0 || out.len() >= limit {
            break;
        }
        let part = (size - skip).min(left);
        out.push(iovec {
            iov_base: segment.iov_base.wrapping_byte_add(skip as usize),
            iov_len: part as usize,
        });
        left -= part;
        skip = 0;
    }
    len - left
}

/// Calls `each` with the address and length of each piece of `len` bytes from `start` on, within
/// the segments.
fn pieces(segments: &[iovec], start: u64, len: u64, mut each: impl FnMut(*mut u8, usize)) {
    let (mut left, mut skip) = (len, start);
    for segment in segments {
        let size = segment.iov_len as u64;
        if skip >= size {
            skip -= size;
            continue;
        }
        let part = (size - skip).min(left);
        if part == 0 {
            return;
        }
        let at = segment.iov_base.cast::<u8>();
        each(at.wrapping_add(skip as usize), part as usize);
        left -= part;
        skip = 0;
    }
}

/// Copies bytes into the segments, from `start` on.
///
/// # Safety
/// The segments are valid for writing, and none of them overlaps `bytes`.
pub(super) unsafe fn scatter(segments: &[iovec], start: u64, bytes: &[u8]) {
    let mut from = bytes;
    pieces(segments, start, bytes.len() as u64, |to, len| {
        let (now, later) = from.split_at(len);
        // SAFETY: `len` bytes of a segment, as required of the caller.
        unsafe { to.copy_from_nonoverlapping(now.as_ptr(), len) };
        from = later;
    });
}

/// Writes `len` zeroes into the segments, from `start` on.
///
/// # Safety
/// The segments are valid for writing.
pub(super) unsafe fn clear(segments: &[iovec], start: u64, len: u64) {
    // SAFETY: bytes of a segment, as required of the caller.
    pieces(segments, start, len, |to, len| unsafe {
        to.write_bytes(0, len)
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segments(memory: &mut [u8], lens: &[usize]) -> Vec<iovec> {
        let mut at = memory.as_mut_ptr();
        let iovec = |&len: &usize| {
            let segment = iovec {
                iov_base: at.cast(),
                iov_len: len,
            };
            at = at.wrapping_add(len);
            segment
        };
        lens.iter().map(iovec).collect()
    }

    proptest! {
        #[test]
        fn parts_are_those_of_the_whole(
            lens in prop::collection::vec(0..9usize, 1..8),
            start in 0..80u64,
            len in 0..80u64,
            limit in 0..9usize,
        ) {
            let size: usize = lens.iter().sum();
            let mut memory = vec![1; size];
            let segments = segments(&mut memory, &lens);
            let base = memory.as_ptr() as u64;
            let mut out = Vec::new();
            let found = gather(&segments, start, len, limit, &mut out);
            let mut at = base + start;
            for iov in &out {
                prop_assert!(iov.iov_len > 0);
                prop_assert_eq!(iov.iov_base as u64, at);
                at += iov.iov_len as u64;
            }
            prop_assert!(out.len() <= limit);
            if !out.is_empty() {
                prop_assert_eq!(at, base + start + found);
            }
            let there = (size as u64).saturating_sub(start).min(len);
            if limit > lens.len() {
                prop_assert_eq!(found, there);
            }
            // SAFETY: the segments lie in `memory`.
            unsafe { clear(&segments, start, len) };
            let zeroes = memory.iter().filter(|byte| **byte == 0).count() as u64;
            prop_assert_eq!(zeroes, there);
            let bytes: Vec<u8> = (0..there).map(|n| n as u8 + 2).collect();
            // SAFETY: the segments lie in `memory`.
            unsafe { scatter(&segments, start, &bytes) };
            let start = (start as usize).min(size);
            prop_assert_eq!(&memory[start..start + bytes.len()], &bytes[..]);
        }
    }
}
