//! Tests moves of disks from one server to another.
//!
//! The image at the source is the reference: no process changes it after the disk has been taken
//! over.

#[path = "../support/mod.rs"]
mod support;

mod comes;
mod crash;
mod follows;
mod pair;
mod refused;
mod tenants;
