//! Base images that come from afar as they are needed (`fathom serve --base`): the images are nbdkit's, and those
//! who compare are QEMU's tools.

mod away;
mod cache;
mod hostile;
mod place;
mod stored;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
mod terms;
