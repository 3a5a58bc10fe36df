//! Disks that go from one server to another. The image that was left is the oracle: nobody changes it after
//! the disk has been taken over.

#[path = "../support/mod.rs"]
mod support;

mod comes;
mod crash;
mod follows;
mod pair;
mod refused;
mod tenants;
