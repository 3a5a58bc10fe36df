//! What there is to record of a disk's way through its host.

use std::path::Path;

use super::Tracefs;
use super::ftrace::Mode;

/// A disk, its guest's QEMU and its server.
pub struct Scene<'a> {
    pub tracefs: &'a Tracefs,
    pub mode: Mode,
    /// Of QEMU and of the disk's server.
    pub threads: &'a [u32],
    /// Of the disk's server, those that may serve it.
    pub serving: &'a [u32],
    /// The block device below its image: dev_t of the whole, and of its partitions that count.
    pub device: Option<(u64, &'a [u64])>,
    /// Where a server that has stamps of its own is asked for them.
    pub api: Option<&'a Path>,
    /// QEMU's.
    pub accelerator: &'a str,
}
