//! Images in other programs' formats as read-only storages that present the bytes of the disk.
//!
//! - `open` finds the files of an image;
//! - `tables` holds the tables of an image in use;
//! - `bytes` is the blocking access, which helper threads also use for requests (`channel`);
//! - `storage` combines all of them.

mod bytes;
mod channel;
mod open;
mod storage;
mod tables;

pub(in crate::served) use open::open;
pub use open::read_foreign;
