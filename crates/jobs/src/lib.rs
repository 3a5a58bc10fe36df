//! Work on running disks, beside their users: one folder each.
//!
//! - `pull` copies a disk from the server where its guest runs, and takes it over from there.

pub mod pull;
