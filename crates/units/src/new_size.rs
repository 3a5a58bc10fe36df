//! New sizes, absolute or relative to the present size.

use crate::parse_size;

/// A new size in bytes, or the difference from the present size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// The size itself.
    To(u64),
    /// Number of bytes to add.
    Plus(u64),
    /// Number of bytes to remove.
    Minus(u64),
}

impl NewSize {
    /// Reads `20G`, `+5M` or `-1G`, with the units of [`parse_size`].
    pub fn parse(text: &str) -> Result<NewSize, String> {
        if let Some(more) = text.strip_prefix('+') {
            return parse_size(more).map(NewSize::Plus);
        }
        match text.strip_prefix('-') {
            Some(less) => parse_size(less).map(NewSize::Minus),
            None => parse_size(text).map(NewSize::To),
        }
    }

    /// Returns the new size in bytes. None: the result is less than 0 or more than 2^64 - 1.
    pub fn apply(self, present: u64) -> Option<u64> {
        match self {
            NewSize::To(size) => Some(size),
            NewSize::Plus(more) => present.checked_add(more),
            NewSize::Minus(less) => present.checked_sub(less),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_sizes_are_absolute_or_relative() {
        let resized = |text: &str| NewSize::parse(text).unwrap().apply(4096);
        assert_eq!(resized("1k"), Some(1024));
        assert_eq!(resized("+1k"), Some(5120));
        assert_eq!(resized("-1k"), Some(3072));
        assert_eq!(resized("-4k"), Some(0));
        assert_eq!(resized("-5k"), None);
        assert_eq!(resized("+15.9999999999999999E"), None);
        for bad in ["", "+", "-", "++1k", "+-1k", "--1k", " 1k"] {
            assert!(NewSize::parse(bad).is_err(), "{bad}");
        }
    }
}
