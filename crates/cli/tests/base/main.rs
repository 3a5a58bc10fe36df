//! Tests base images whose data is fetched on demand (`fathom serve --base`).
//!
//! nbdkit serves the images, and QEMU's tools compare the disks.

mod away;
mod cache;
mod hostile;
mod place;
mod stored;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
mod terms;
