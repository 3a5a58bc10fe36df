//! Work on running disks, beside their users: one folder each.
//!
//! - `backup` keeps a disk as it was at an instant, to be read at leisure;
//! - `mirror` copies a disk to another one, and follows it until both are the same;
//! - `pull` copies a disk from the server where its guest runs, and takes it over from there.
//!
//! `source` is what they work on, `copy` the copying itself.

pub mod backup;
mod copy;
pub mod mirror;
pub mod pull;
mod source;

pub use source::{InUse, Source};
