//! Tests of disks in files and in memory, without a server.

#[path = "../common/mod.rs"]
mod common;
mod durability;
mod faults;
mod files;
mod locks;
mod resize;
mod status;
mod surroundings;
