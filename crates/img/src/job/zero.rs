//! Detects zeroes within data.

use fathom_core::is_zero;

/// Returns whether the first granule of `bytes` is all zeroes, and the length of the run of
/// granules like it. `start` is the offset of `bytes` in the disk, which aligns the granules. With
/// a granule of 0, all bytes count as data.
pub(crate) fn run_of(bytes: &[u8], start: u64, granule: u64) -> (bool, u64) {
    let len = bytes.len() as u64;
    if granule == 0 {
        return (false, len);
    }
    let mut found = None;
    let mut at = 0;
    while at < len {
        let end = (start + at + 1).next_multiple_of(granule) - start;
        let end = end.min(len);
        let is_zero = is_zero(&bytes[at as usize..end as usize]);
        match found {
            None => found = Some(is_zero),
            Some(before) if before != is_zero => break,
            _ => {}
        }
        at = end;
    }
    (found.unwrap_or(false), at)
}

#[cfg(test)]
mod tests {
    use super::run_of;

    #[test]
    fn runs_end_where_granules_do() {
        let mut bytes = vec![0; 100];
        bytes[50] = 1;
        assert_eq!(run_of(&bytes, 0, 10), (true, 50));
        assert_eq!(run_of(&bytes[50..], 50, 10), (false, 10));
        // Granules are aligned in the disk, not in the buffer.
        assert_eq!(run_of(&bytes, 5, 10), (true, 45));
        assert_eq!(run_of(&bytes, 0, 64), (false, 64));
        assert_eq!(run_of(&bytes, 0, 0), (false, 100));
        assert_eq!(run_of(&[], 0, 10), (false, 0));
    }
}
