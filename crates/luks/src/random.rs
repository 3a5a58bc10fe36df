//! Random bytes from the kernel.

use crate::error::{Error, Result};

/// Fills `bytes` with random bytes.
pub fn fill(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(Error::Random)
}

/// Returns `N` random bytes.
pub fn array<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    fill(&mut bytes)?;
    Ok(bytes)
}

/// Returns a random UUID (RFC 9562, version 4) in the usual notation.
pub fn uuid() -> Result<String> {
    let mut bytes: [u8; 16] = array()?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    Ok(text)
}
