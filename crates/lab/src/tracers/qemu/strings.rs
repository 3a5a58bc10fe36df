//! The strings of a stream: names of events and of source files, a bounded number.

use std::collections::HashMap;

/// QEMU has some five thousand events; what has more names than this is not its log.
const MAX: usize = 1 << 14;

/// Strings by number.
#[derive(Debug, Default)]
pub(super) struct Strings {
    numbers: HashMap<String, u64>,
    list: Vec<String>,
}

impl Strings {
    /// The number of a string, new or old; None when there are too many.
    pub fn add(&mut self, text: &str) -> Option<u64> {
        if let Some(number) = self.get(text) {
            return Some(number);
        }
        if self.list.len() == MAX {
            return None;
        }
        let number = self.list.len() as u64;
        self.list.push(text.to_owned());
        self.numbers.insert(text.to_owned(), number);
        Some(number)
    }

    /// The number of a string that was added.
    pub fn get(&self, text: &str) -> Option<u64> {
        self.numbers.get(text).copied()
    }

    /// All, in order of their numbers.
    pub fn list(&self) -> Vec<String> {
        self.list.clone()
    }
}
