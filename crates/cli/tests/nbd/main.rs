//! `fathom serve --nbd` under programs that others wrote: libnbd with nbdinfo,
//! nbdcopy and scripts, QEMU's tools, fio; under clients that mean harm; and as
//! a client itself.

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
