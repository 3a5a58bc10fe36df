//! The objects to record on a disk's path through its host.

use std::path::Path;

use super::Tracefs;
use super::ftrace::Mode;

/// A disk, its guest's QEMU and its server.
pub struct Scene<'a> {
    /// tracefs, in which the collectors create their instances.
    pub tracefs: &'a Tracefs,
    /// When the kernel's buffers are read, and their size.
    pub mode: Mode,
    /// Thread ids of QEMU and of the disk's server.
    pub threads: &'a [u32],
    /// Thread ids of the disk's server that may serve the disk.
    pub serving: &'a [u32],
    /// The block device below the image: dev_t of the whole disk, and of its relevant partitions.
    pub device: Option<(u64, &'a [u64])>,
    /// API socket of a server that has timestamps of its own.
    pub api: Option<&'a Path>,
    /// Name of QEMU's accelerator.
    pub accelerator: &'a str,
}
