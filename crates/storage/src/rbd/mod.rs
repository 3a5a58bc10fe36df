//! A disk that is an image on a Ceph cluster (RBD).
//!
//! Ceph's own library does all that is Ceph's; it is loaded when the first such disk is opened.
//!
//! - `address` is how an image is written, `library` the functions of librbd, `cluster`, `image` and its `handle`
//!   what is open, and `disk` what is served of it;
//! - `channel` is one worker's way to it: it gives requests to the library as they are, whose threads put
//!   what has `ended` into a list, and wake the worker by an eventfd;
//! - `lock` is how others are kept from an image that is in use;
//! - `inquirer` is a thread for block status, which the library tells only to whoever waits.
//!
//! While a disk that can be written is in use it has the image's exclusive lock: nobody else gets it who does
//! not break it. Who has been shut out by such a one fails all requests.

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

/// Loads the library, for a process that may soon load nothing any more. The error is one line that says what to
/// do.
pub fn prepare() -> Result<(), String> {
    library::library().map(drop)
}
pub(crate) use place::KIND;
