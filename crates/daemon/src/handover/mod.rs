//! One process goes, and another one goes on: an upgrade under running guests.
//!
//! - `estate` is what goes;
//! - `state` is what the two say, and when, `left` what parts of disks have to say, `wire` how it gets
//!   from one to the other;
//! - `successor` is the other process, and `starter` who starts it, `program` which it
//!   is;
//! - `sender` is the old one's side, `receiver` the new one's.

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
    ApiState, DiskState, DoorState, GroupsState, ProcessState, Progress, Renewal, State,
    TenantDisk, TenantState, VERSION, WITH_PARTS, WITH_UNFINISHED_MESSAGES,
};
