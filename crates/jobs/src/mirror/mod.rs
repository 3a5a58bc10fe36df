//! Copies a disk to another one while it is in use, until both are identical. Then the target may
//! replace the disk, or be kept as a copy of that instant.
//!
//! - `terms` are the parameters;
//! - `todo` finds the initial data, and `noting` records the changes by users;
//! - `follower` is the thread: it copies the initial data, then the changes;
//! - `handle` starts and controls the mirror, and `following` is the state that both share.
//!
//! A mirror never blocks users for good: any problem ends the mirror, and the disk is unchanged.
//! While the mirror *brakes*, users may change no more than is copied, so that it converges under
//! any load.

mod follower;
mod handle;
mod noting;
mod terms;
mod todo;

pub use handle::Mirror;
pub use terms::{Target, Terms};
