//! Storage back-ends of disks: files, memory, NBD exports, Ceph images, cached base images.
//!
//! A [`Disk`](fathom_core::Disk) is one of
//!
//! - [`FileDisk`]: a regular file or a block device, in one of the three cache modes ([`Cache`]).
//!   While active, it is locked as QEMU locks images;
//! - [`MemoryDisk`]: memory of this process, which begins as zeroes and is lost when the process
//!   ends;
//! - [`NbdDisk`]: an export of an NBD server. Each worker has connections of its own;
//! - [`RbdDisk`]: an image on Ceph;
//! - a base image that is fetched to this host on demand ([`cached`]);
//! - [`NullDisk`]: no data at all, which measures Fathom's own cost.
//!
//! Each back-end is a [`Kind`] with its own folder or file and an entry in [`KINDS`]. [`Location`]
//! parses what users write and opens the disk of the matching kind.
//!
//! A worker accesses a file through an [`Engine`](fathom_core::Engine), which [`engine`](fn@engine)
//! creates on the worker's thread: [`engine::IoUring`], [`engine::Native`] (Linux AIO) or
//! [`engine::Threads`]. Memory and null disks need an engine only to sleep.
//!
//! A request to a file is served in the first of these ways that applies:
//!
//! 1. The file is in tmpfs and the request is at most 64 KiB long: at once, by a system call.
//! 2. The request is a read through the page cache, with an engine other than io_uring: at once, if
//!    the page cache holds all of it.
//! 3. The request's address, offset and length suit the file: one operation of the engine, directly
//!    on the guest's memory.
//! 4. Otherwise in pieces: through an aligned buffer, as read-modify-write of whole blocks, by
//!    fallocate(2), or by writing zeroes.
//!
//! Short transfers are continued. Failures are reported to the guest and logged.

mod buffers;
mod bytes;
pub mod cached;
pub mod engine;
pub mod file;
mod kind;
mod kinds;
pub mod memory;
pub mod nbd;
pub mod null;
mod ranges;
pub mod rbd;

pub use bytes::ByteDisk;
pub use cached::CacheTerms;
pub use engine::{EngineKind, Users, engine, engine_for};
pub use file::{Cache, EndGuard, FileDisk, FileOptions, OnSuperseded, refusal_of};
pub use kind::{Halt, Kind, OpenOptions, Opened, PART};
pub use kinds::{KINDS, Location};
pub use memory::MemoryDisk;
pub use nbd::{ChangesClient, NbdDisk, NbdOptions, connect};
pub use null::NullDisk;
pub use rbd::RbdDisk;
