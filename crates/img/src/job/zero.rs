//! Zeroes among data.

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // Blocks that the compiler turns into vector instructions.
    let (blocks, rest) = bytes.as_chunks::<128>();
    let any = |block: &[u8; 128]| block.iter().fold(0, |all, byte| all | byte) != 0;
    !blocks.iter().any(any) && rest.iter().all(|byte| *byte == 0)
}

/// Whether bytes begin with zeroes, and how many of them are like the first: whole granules of the disk, in
/// which they are at `start`. With a granule of 0 all are data.
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
    use super::{is_zero, run_of};

    #[test]
    fn one_byte_is_seen_wherever_it_is() {
        for len in [0, 1, 127, 128, 129, 600] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes));
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn runs_end_where_granules_do() {
        let mut bytes = vec![0; 100];
        bytes[50] = 1;
        assert_eq!(run_of(&bytes, 0, 10), (true, 50));
        assert_eq!(run_of(&bytes[50..], 50, 10), (false, 10));
        // The granules are the disk's.
        assert_eq!(run_of(&bytes, 5, 10), (true, 45));
        assert_eq!(run_of(&bytes, 0, 64), (false, 64));
        assert_eq!(run_of(&bytes, 0, 0), (false, 100));
        assert_eq!(run_of(&[], 0, 10), (false, 0));
    }
}
