//! Memory for in-flight state that outlives a server.

use fathom_core::SavedState;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns new memory with these words, or `None` if there are no words.
pub fn with(words: &[u64]) -> Option<SavedState> {
    let memory: Vec<AtomicU64> = words.iter().map(|word| (*word).into()).collect();
    let memory = Arc::new(memory);
    let base = NonNull::from(memory.first()?).cast();
    // SAFETY: the vector has that many words, and the returned value keeps it alive.
    Some(unsafe { SavedState::new(base, words.len(), memory) })
}

/// Returns the words in the memory.
pub fn words(memory: Option<&SavedState>) -> Vec<u64> {
    let words = memory.map_or(&[][..], SavedState::words);
    words.iter().map(|w| w.load(Ordering::Acquire)).collect()
}
