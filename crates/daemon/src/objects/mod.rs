//! What a daemon has by name: its disks, each with its exports and its trace, and the server of NBD
//! clients that they share.

mod disk;
mod nbd;
mod serving;
mod shared_disk;
mod tracer;

pub use disk::{Outcome, Served};
pub use nbd::Nbd;
pub use tracer::{CALIBRATE_EVERY, Tracer};
