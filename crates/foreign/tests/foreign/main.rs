//! Images of other programs (VMDK, VHDX, and others), as those programs make them, and damaged.

mod damaged;
mod hostile;
mod qemu;
mod support;
mod vhdx;
mod vmdk;
