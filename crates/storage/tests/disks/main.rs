//! Disks of files and of memory, without a server around them.

#[path = "../common/mod.rs"]
mod common;
mod durability;
mod faults;
mod files;
mod locks;
mod resize;
mod status;
mod surroundings;
