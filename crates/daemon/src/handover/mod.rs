//! Hands the server over to another process while guests run: an upgrade.
//!
//! - `estate` is the interface of a host whose disks can be handed over;
//! - `state` has the protocol, `left` the states of the parts of a disk, and `wire` sends messages and files;
//! - `successor` is the new process, `starter` starts it, and `program` chooses its program;
//! - `sender` is the side of the predecessor, `receiver` that of the successor.

mod estate;
mod left;
mod program;
mod receiver;
mod sender;
mod starter;
mod state;
mod successor;
mod wire;

pub use estate::{Estate, Given, GivenDisk};
pub use receiver::receive;
pub use sender::{HandedOver, PATIENCE, hand_over, hand_over_disks};
pub use starter::{Starter, TAKE_OVER, start_successors};
pub use state::{
    DiskState, GroupsState, ProcessState, Progress, Renewal, State, TenantDisk, TenantState,
    VERSION, WITH_PARTS, WITH_UNFINISHED_MESSAGES,
};
