//! What a daemon has by name: its disks, each with its exports and its trace, and the server of NBD
//! clients that they share. Disks come and go while others are served.

mod activity;
mod all;
mod backup;
mod changes;
mod definitions;
mod disk;
mod freeze;
mod inherited;
mod marks;
mod mirror;
mod moves;
mod nbd;
mod remake;
mod serving;
mod shared_disk;
mod snapshots;
mod stream;
mod tracer;
mod unanswered;

pub use all::Objects;
