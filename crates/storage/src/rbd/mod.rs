//! A disk that is an image on a Ceph cluster (RBD).
//!
//! Ceph's own library does the work; it is loaded when the first such disk is opened.
//!
//! - `address` is the syntax of an image's address, and `library` has the functions of librbd.
//!   `cluster`, `image` and its `handle` are the open objects, and `disk` serves the image;
//! - `channel` is one worker's access to the image. The channel passes requests unchanged to the
//!   library. The library's threads add the operations that have `ended` to a list and wake the
//!   worker by an eventfd;
//! - `lock` keeps other clients from an image that is in use;
//! - `inquirer` is a thread for block status and growth, for which the library has only blocking
//!   calls.
//!
//! While a writable disk is in use, it holds the image's exclusive lock: no other client can write
//! the image without breaking the lock. If another client breaks the lock, all requests of the disk
//! fail.

mod address;
mod channel;
mod cluster;
mod disk;
mod ended;
mod handle;
mod image;
mod inquirer;
mod library;
mod lock;
mod place;
mod shared;

pub use disk::RbdDisk;

/// Loads the library, for a process that will soon be unable to load libraries. The error is one
/// line that says what to do.
pub fn prepare() -> Result<(), String> {
    library::library().map(drop)
}
pub(crate) use place::KIND;
