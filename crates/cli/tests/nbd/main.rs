//! `fathom serve --nbd` under programs that others wrote: libnbd with nbdinfo,
//! nbdcopy and scripts, QEMU's tools, fio; and under clients that mean harm.

#[path = "../support/mod.rs"]
mod support;

mod commands;
mod crash;
mod hostile;
mod tls;
mod tools;
