//! The channel's notes in a request: indexes of [`Request::memo`](fathom_core::Request::memo).

/// Storage that the request was passed to.
pub(super) const STORAGE: usize = 0;

/// Parity of the epoch in which the request is counted.
pub(super) const EPOCH: usize = 1;

/// Value of [`EPOCH`] for a request that is not counted.
pub(super) const UNCOUNTED: u8 = u8::MAX;
