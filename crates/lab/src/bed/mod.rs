//! Where work runs: what a cell needs around it.

mod guest;
pub mod image;

pub use guest::{DISK, GuestBed};
