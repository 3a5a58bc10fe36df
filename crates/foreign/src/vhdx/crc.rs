//! CRC-32C, as specified for iSCSI (RFC 3720, section B.4).

/// For each byte value, the result of eight steps with the bit-reversed polynomial.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            sum = (sum >> 1) ^ (0x82f6_3b78 * (sum & 1));
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
};

/// Returns the checksum of the concatenated `parts`.
pub fn crc32c(parts: &[&[u8]]) -> u32 {
    let bytes = parts.iter().copied().flatten();
    !bytes.fold(u32::MAX, |sum, byte| {
        (sum >> 8) ^ TABLE[usize::from(sum as u8 ^ byte)]
    })
}

/// Returns whether the checksum at `at` is that of `bytes` with zeroes in its place.
pub fn is_right(bytes: &[u8], at: usize) -> bool {
    let (before, rest) = bytes.split_at(at);
    let (stored, after) = rest.split_at(4);
    stored == crc32c(&[before, &[0; 4], after]).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors of RFC 3720, section B.4.
    #[test]
    fn sums_are_those_of_the_specification() {
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[&[0; 32]]), 0x8a91_36aa);
        assert_eq!(crc32c(&[&[0xff; 20], &[0xff; 12]]), 0x62a8_ab43);
        assert_eq!(crc32c(&[&rising]), 0x46dd_794e);
    }
}
