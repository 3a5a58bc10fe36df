//! Identities: names that no other object has, and that no client can guess.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Number of hexadecimal digits of an identity.
const DIGITS: usize = 32;

/// Returns a new identity.
pub fn new_identity() -> String {
    // (Keyed by the system's random numbers.)
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

/// Whether the text could be an identity.
pub fn is_identity(text: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == DIGITS && text.bytes().all(is_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_differ_and_are_recognised() {
        let (one, other) = (new_identity(), new_identity());
        assert_ne!(one, other);
        assert!(is_identity(&one) && is_identity(&other));
        assert!(is_identity("0123456789abcdef0123456789abcdef"));
        for text in [
            "",
            "vm1",
            "0123456789abcdef0123456789abcde",
            "0123456789abcdef0123456789abcdef0",
            "0123456789ABCDEF0123456789ABCDEF",
            "0123456789abcdef0123456789abcdeg",
        ] {
            assert!(!is_identity(text), "{text}");
        }
    }
}
