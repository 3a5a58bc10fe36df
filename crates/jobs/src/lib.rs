//! Work on running disks, beside their users: one folder each.
//!
//! - `backup` keeps a disk as it was at an instant, to be read at leisure;
//! - `pull` copies a disk from the server where its guest runs, and takes it over from there.
//!
//! `copy` is the copying itself.

pub mod backup;
mod copy;
pub mod pull;
