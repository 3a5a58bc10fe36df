//! The state that a process hands over to its successor, which is an upgrade or another process of
//! a tenant.
//!
//! - `handover_host` is the interface of a host whose disks can be handed over;
//! - `state` has the protocol, and `part_records` the states of the parts of a disk.

mod handover_host;
mod part_records;
mod state;

pub use handover_host::{Given, GivenDisk, HandoverHost};
pub use part_records::{PartRecords, describe, taken};
pub use state::*;
