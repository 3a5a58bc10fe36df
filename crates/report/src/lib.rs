//! Reports: pure functions of a run directory.
//!
//! [`analysis`] has the shape of everything that can be said about a run; the renderers know
//! nothing but that.

mod analyse;
pub mod analysis;
pub mod calls;
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
