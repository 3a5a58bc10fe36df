//! Base images that come from afar as they are needed (`fathom serve --base`): the images are nbdkit's, and those
//! who compare are QEMU's tools.

mod away;
mod cache;
#[allow(dead_code, reason = "shared with other test programs")]
#[path = "../support/driver.rs"]
mod driver;
mod place;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
mod terms;
