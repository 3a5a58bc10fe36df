//! The disks of a process: each with its exports, its jobs and its trace, and the NBD server that
//! they share. Disks are added, changed and removed while others are served.
//!
//! - `all` is the host of the disks, which carries out commands; `changes` has the operations that
//!   may take long;
//! - `disk` is one disk that is served, `shared_disk` what its users share, `serving` the threads
//!   of its clients;
//! - `remake` replaces a disk in use, for new options or a new image, and `marks` marks the
//!   superseded image;
//! - `backup`, `mirror`, `stream` and `moves` are jobs; `freeze` and `snapshots` stop a disk for a
//!   while;
//! - `activity` is the operation in progress on each disk;
//! - `definitions` reads the files that define disks;
//! - `nbd` is the NBD server, `tracer` a trace, `inherited` the counters of a predecessor.

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
