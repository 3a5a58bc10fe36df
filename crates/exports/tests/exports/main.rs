//! Disks for front-ends (vhost-user-blk), as QEMU and hostile ones use them.

mod drain;
mod garbage;
mod handover;
mod memory;
mod migration;
mod qemu;
mod session;
#[path = "../support/mod.rs"]
mod support;
