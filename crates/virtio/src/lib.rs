//! Split and packed virtqueues and virtio-blk: converts descriptor chains in guest memory to
//! [`Request`](fathom_core::Request)s and back.
//!
//! A [`DiskQueue`] is the [`Source`](fathom_core::Source) that a worker pops. The queue owns one
//! ring, a [`SplitQueue`] or a [`PackedQueue`], and reads descriptor chains through the
//! connection's [`GuestMemory`]. If the front-end requests it, the queue maintains an in-flight
//! region ([`InflightQueue`] or [`PackedInflight`]) and a dirty log ([`DirtyLog`]).
//!
//! The guest can change its memory at any time, and its contents are not trusted. Therefore every
//! shared field is read once into a private copy, and the copy is checked. All accesses are
//! volatile or atomic, and there are no references into guest memory.
//!
//! Section numbers refer to the Virtual I/O Device specification 1.2; "vhost-user" is QEMU's
//! docs/interop/vhost-user.rst.

pub mod blk_device;
pub mod blk_queue;
mod chain;
pub mod config;
mod descriptor;
pub mod dirty_log;
pub mod features;
pub mod inflight;
pub mod memory;
pub mod packed;
pub mod packed_inflight;
mod position;
pub mod queue;
mod request;
mod ring;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use blk_device::BlkDevice;
pub use blk_queue::{BlkQueue, DiskQueue, PackedBlkQueue, QueueError, QueueSetup, signal};
pub use dirty_log::DirtyLog;
pub use inflight::InflightQueue;
pub use memory::{GuestMemory, GuestRegion, MemoryError};
pub use packed::PackedQueue;
pub use packed_inflight::PackedInflight;
pub use queue::SplitQueue;
