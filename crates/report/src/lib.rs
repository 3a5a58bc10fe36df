//! Reports: pure functions of a run directory.
//!
//! [`analysis`] has the shape of everything that can be said about the requests of a run; the
//! renderers know nothing but that. [`cells`] is the same for experiments, whose runs are tables.

mod analyse;
pub mod analysis;
pub mod calls;
pub mod cells;
mod clock;
pub mod distribution;
mod join;
pub mod locks;
mod overhead;
mod picture;
pub mod qemu;
pub mod render;
mod threads;
pub mod time_lines;
mod timing;
mod wiki;

pub use analyse::{Options, analyse};
