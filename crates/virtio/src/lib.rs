//! Split virtqueues and virtio-blk: from a guest's memory to a
//! [`Request`](fathom_core::Request) and back.
//!
//! A [`BlkQueue`] is the [`Source`](fathom_core::Source) that a worker pops.
//! It owns one [`SplitQueue`], reads descriptor chains through the connection's
//! [`GuestMemory`] and, where the front-end asked for it, keeps its in-flight
//! region ([`InflightQueue`]) and its dirty log ([`DirtyLog`]).
//!
//! Whatever lies in guest memory may change under our hands and may lie. So
//! every shared field is read once into a private copy, and the copy is
//! checked; all accesses are volatile or atomic; there are no references into
//! guest memory.
//!
//! Section numbers are those of the Virtual I/O Device specification 1.2;
//! "vhost-user" is QEMU's docs/interop/vhost-user.rst.

pub mod blk_device;
pub mod blk_queue;
mod chain;
pub mod config;
mod descriptor;
pub mod dirty_log;
pub mod features;
pub mod inflight;
pub mod memory;
pub mod queue;
mod request;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use blk_device::BlkDevice;
pub use blk_queue::{BlkQueue, QueueError, QueueSetup, signal};
pub use dirty_log::DirtyLog;
pub use inflight::InflightQueue;
pub use memory::{GuestMemory, GuestRegion, MemoryError};
pub use queue::SplitQueue;
