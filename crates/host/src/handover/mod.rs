//! What a process hands over to its successor: an upgrade, or another process of a tenant.
//!
//! - `estate` is the interface of a host whose disks can be handed over;
//! - `state` has the protocol, and `left` the states of the parts of a disk.

mod estate;
mod left;
mod state;

pub use estate::{Estate, Given, GivenDisk};
pub use left::{LeftState, describe, taken};
pub use state::*;
