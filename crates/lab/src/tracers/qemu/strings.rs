//! The string table of a stream: names of events and of source files. The table's size is limited.

use std::collections::HashMap;

/// Maximum number of strings. QEMU has about five thousand events, so more names mean a damaged
/// log.
const MAX: usize = 1 << 14;

/// Strings by number.
#[derive(Debug, Default)]
pub(super) struct Strings {
    numbers: HashMap<String, u64>,
    list: Vec<String>,
}

impl Strings {
    /// Adds a string if it is new and returns its number. Returns `None` if the table is full.
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

    /// Returns the number of a string that was added.
    pub fn get(&self, text: &str) -> Option<u64> {
        self.numbers.get(text).copied()
    }

    /// Returns all strings in order of their numbers.
    pub fn list(&self) -> Vec<String> {
        self.list.clone()
    }
}
