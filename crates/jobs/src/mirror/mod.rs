//! A disk that is copied to another one while its users go on, until both are the same: then it may take the place
//! of the first, or be kept as it was at that instant.
//!
//! - `terms` are what is asked for, and what is told of it;
//! - `todo` is what is to be copied at the beginning, and `noting` adds what users change then;
//! - `follower` is what the thread does: it copies what there is, and again what users have changed meanwhile;
//! - it is started and asked by way of `handle`, and `following` is what both know.
//!
//! Users are never kept from anything for good: what goes wrong ends the mirror, and the disk is as before. While it
//! *brakes*, they change no more than is copied meanwhile, so that it comes to an end with any load.

mod follower;
mod handle;
mod noting;
mod terms;
mod todo;

pub use handle::Mirror;
pub use terms::{Target, Terms};
