//! What the channel notes with a request until it is done: places in
//! [`Request::memo`](fathom_core::Request::memo).

/// Which of the chain's storages has it.
pub(super) const STORAGE: usize = 0;

/// The parity of the epoch in which it is counted.
pub(super) const EPOCH: usize = 1;

/// It is counted in none.
pub(super) const UNCOUNTED: u8 = u8::MAX;
