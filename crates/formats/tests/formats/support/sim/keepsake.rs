//! Memory that outlives a server.

use fathom_core::Keepsake;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// New memory with this in it; none if it has no room for anything.
pub fn with(words: &[u64]) -> Option<Keepsake> {
    let memory: Vec<AtomicU64> = words.iter().map(|word| (*word).into()).collect();
    let memory = Arc::new(memory);
    let base = NonNull::from(memory.first()?).cast();
    // SAFETY: the vector has so many words and is kept.
    Some(unsafe { Keepsake::new(base, words.len(), memory) })
}

/// What is in it.
pub fn words(memory: Option<&Keepsake>) -> Vec<u64> {
    let words = memory.map_or(&[][..], Keepsake::words);
    words.iter().map(|w| w.load(Ordering::Acquire)).collect()
}
