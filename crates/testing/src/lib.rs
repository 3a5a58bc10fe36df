//! What tests of several crates have in common: how they wait, and what randomized ones count. Nothing else uses this
//! crate.

mod chance;
mod tally;
mod waiting;

pub use chance::decide;
pub use tally::{Tried, is_time_up};
pub use waiting::{Deadline, PATIENCE, eventually, threads_of, until};
