//! For tests of this crate and of its dependents: a minimal engine, and a disk that holds its
//! requests until the test orders it to complete them.

mod disk;
mod engine;

pub use disk::{SIZE, State, TestDisk};
pub use engine::PollEngine;
