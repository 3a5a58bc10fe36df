//! Detects zeroes.

/// Returns whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // The compiler turns these blocks into vector instructions.
    let (blocks, rest) = bytes.as_chunks::<128>();
    let any = |block: &[u8; 128]| block.iter().fold(0, |all, byte| all | byte) != 0;
    !blocks.iter().any(any) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::is_zero;

    #[test]
    fn one_byte_is_seen_wherever_it_is() {
        for len in [0, 1, 127, 128, 129, 600, 70_001] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in (0..len).step_by(1 + len / 600) {
                bytes[at] = 1;
                assert!(!is_zero(&bytes));
                bytes[at] = 0;
            }
        }
    }
}
