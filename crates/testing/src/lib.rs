//! Helpers for the tests of several crates: waiting for events, counters for randomized tests,
//! directories for other programs' files, and paths whose instructions are counted. Only tests and
//! examples use this crate.

mod chance;
mod instructions;
mod memory_dir;
mod priority;
mod set_at_end;
mod tally;
mod waiting;

pub use chance::decide;
pub use instructions::count_instructions;
pub use memory_dir::MemoryDir;
pub use priority::outrank_other_programs;
pub use set_at_end::SetAtEnd;
pub use tally::{Tried, is_time_up};
pub use waiting::{Deadline, PATIENCE, eventually, threads_of, until};
