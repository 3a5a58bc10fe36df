//! For tests of this crate and of those above it: the smallest engine, and a
//! disk that answers when it is told to.

mod disk;
mod engine;

pub use disk::{SIZE, State, TestDisk};
pub use engine::PollEngine;
