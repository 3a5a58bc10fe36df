//! NBD servers of others, honest and not, and disks on them.

mod changes;
#[path = "../common/mod.rs"]
mod common;
mod hostile;
mod losses;
mod server;
mod servers;
mod tls;
