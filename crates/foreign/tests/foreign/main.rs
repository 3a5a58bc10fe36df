//! Images of other programs (VMDK, VHDX, and others), both intact and damaged.

mod damaged;
mod hostile;
mod qemu;
mod support;
mod vhdx;
mod vmdk;
