//! LUKS containers, tested against cryptsetup and QEMU.

mod cryptsetup;
mod hostile;
mod keys;
mod qemu;
mod support;
mod xts;
