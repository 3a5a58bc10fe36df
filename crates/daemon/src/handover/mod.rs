//! Hands the server over to another process while guests run: an upgrade.
//!
//! - `handover_host` is the interface of a host whose disks can be handed over;
//! - `state` has the protocol, `left` the states of the parts of a disk, and `wire` sends messages
//!   and files;
//! - `successor` is the new process, `starter` starts it, and `program` chooses its program;
//! - `sender` is the side of the predecessor, `receiver` that of the successor.

mod program;
mod receiver;
mod sender;
mod starter;
mod successor;
mod wire;

pub use receiver::receive;
pub use sender::{HandedOver, hand_over, hand_over_disks};
pub use starter::{Starter, TAKE_OVER, start_successors};
