//! Reports: pure functions of a run directory.
//!
//! [`analysis`] defines everything that a report says about the requests of a run; the renderers
//! use nothing else. [`cells`] is its counterpart for experiments, whose runs are tables.

mod analyse;
pub mod analysis;
pub mod calls;
pub mod cells;
mod clock;
pub mod distribution;
mod impossible;
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
