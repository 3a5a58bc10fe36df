//! Big-endian numbers in byte slices.

/// Returns the big-endian `u64` at byte `at`.
///
/// # Panics
///
/// Panics if `bytes` ends before the number does. The caller has checked the length.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(number)
}

/// Returns the big-endian `u32` at byte `at`. See [`u64_at`].
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(number)
}

/// Returns the big-endian `u16` at byte `at`. See [`u64_at`].
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

pub(crate) fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

/// Makes a name from an image printable: control characters are escaped, so that an untrusted image
/// cannot send escape sequences to the terminal.
pub(crate) fn printable(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    text.chars()
        .flat_map(|c| {
            let escaped = c.is_control().then(|| c.escape_default());
            let plain = (!c.is_control()).then_some(c);
            escaped.into_iter().flatten().chain(plain)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_play_with_the_terminal() {
        assert_eq!(printable(b"base.raw"), "base.raw");
        assert_eq!(printable("Größe".as_bytes()), "Größe");
        assert_eq!(printable(b"a\x1b[2J\n"), "a\\u{1b}[2J\\n");
        assert_eq!(printable("\u{9b}2J".as_bytes()), "\\u{9b}2J");
    }
}
