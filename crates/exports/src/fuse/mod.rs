//! A file that is the disk's raw content, by FUSE.
//!
//! A [`FuseExport`] is mounted over a regular file, as the FUSE export of qemu-storage-daemon is.
//! The root of the mount is a regular file of the disk's size. The program `fusermount3` mounts the
//! file and stays: when this process ends in any way, it unmounts the file.
//!
//! Two threads serve a file. The *session thread* (of the crate `fuser`) reads the kernel's
//! requests. Requests for data go to a [`Source`](fathom_core::Source) of one of the disk's
//! workers. The *reply thread* sends the replies when the disk has completed the requests. The disk
//! is in use while a program has the file open.
//!
//! - `mount` mounts and unmounts,
//! - `device` ends a session whose file is still open,
//! - `export` attaches the file to the disk, pauses it, and ends it,
//! - `file` handles the kernel's requests,
//! - `task` describes a request on its way through the disk,
//! - `source` passes tasks to a worker, `replies` completes them.

mod device;
mod export;
mod file;
mod mount;
mod replies;
mod source;
mod state;
mod task;

pub use export::FuseExport;
pub use mount::{Launch, Mounted, Mounting, install_launcher, launch};
pub use state::Backend;
