//! Tests `fathom serve --nbd` with foreign programs, with hostile clients, and as a client itself.
//!
//! The foreign programs are nbdinfo, nbdcopy and scripts of libnbd, QEMU's tools, and fio.

#[path = "../support/driver.rs"]
#[allow(dead_code, reason = "the serve tests use all of it")]
mod driver;
#[path = "../support/mod.rs"]
mod support;

mod bytes;
mod client;
mod commands;
mod crash;
mod hostile;
mod run;
mod tls;
mod tools;
