//! Tests of disks on NBD servers: nbdkit, qemu-nbd, and hostile ones.

mod changes;
#[path = "../common/mod.rs"]
mod common;
mod hostile;
mod losses;
mod server;
mod servers;
mod tls;
