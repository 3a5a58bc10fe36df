//! Tests of vhost-user-blk exports with QEMU and with hostile front-ends.

mod drain;
mod garbage;
mod handover;
mod memory;
mod migration;
mod packed;
mod qemu;
mod session;
#[path = "../support/mod.rs"]
mod support;
