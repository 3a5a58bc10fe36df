//! A flag that ends other threads, even if a test fails.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when this value is dropped. A thread that runs until the flag is set then ends
/// also if the test panics, so that the test fails instead of hanging.
pub struct SetAtEnd<'a>(pub &'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
