//! How an image's bytes are reached: files, memory, nothing.
//!
//! A [`Disk`](fathom_core::Disk) is one of
//!
//! - [`FileDisk`]: a regular file or a block device, by one of the three cache
//!   modes ([`Cache`]), locked as QEMU locks images while it is active;
//! - [`MemoryDisk`]: zeroes that can be written, gone with the process;
//! - [`NbdDisk`]: an export of an NBD server, by connections of the workers'
//!   own;
//! - [`RbdDisk`]: an image on Ceph;
//! - a base image that comes to this host as it is needed ([`cached`]);
//! - [`NullDisk`]: no data at all, what Fathom costs by itself.
//!
//! Each is a [`Kind`] with a folder or file of its own and a line in [`KINDS`], by which a
//! [`Location`], what users write, is understood and opened.
//!
//! A worker reaches a file by an [`Engine`](fathom_core::Engine), which
//! [`engine`](fn@engine) makes on the worker's thread: [`engine::IoUring`],
//! [`engine::Native`] (Linux AIO) or [`engine::Threads`]. Memory and nothing
//! need an engine only to sleep.
//!
//! How a request to a file is served, in the order in which it is decided:
//!
//! 1. it is in tmpfs and at most 64 KiB long: at once, by a system call;
//! 2. a read through the page cache, with an engine other than io_uring: at
//!    once, if all of it is in the page cache;
//! 3. its address, offset and length suit the file: one operation of the
//!    engine, on the guest's memory;
//! 4. otherwise in pieces: through an aligned buffer, as a read, a change and
//!    a write of whole blocks, by fallocate(2), or by writing zeroes.
//!
//! Whatever moves less than it should is continued, and whatever fails is
//! reported to the guest and in the log.

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
