//! Where work runs: what a cell needs around it.

mod guest;
pub mod image;
mod stages;
mod window;

pub use guest::{DISK, GuestBed};
pub use window::{Job, Seen};
