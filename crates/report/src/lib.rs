//! Reports: pure functions of a run directory.
//!
//! [`analysis`] has the shape of everything that can be said about a run; the renderers know
//! nothing but that.

pub mod analysis;
pub mod calls;
pub mod distribution;
pub mod locks;
pub mod qemu;
pub mod time_lines;
