//! NBD servers of others, honest and not, and disks on them.

#[path = "../common/mod.rs"]
mod common;
mod hostile;
mod losses;
mod server;
mod servers;
mod tls;
