//! LUKS containers, next to cryptsetup and QEMU.

mod cryptsetup;
mod hostile;
mod keys;
mod qemu;
mod support;
mod xts;
