//! Images of other programs as storages in which bytes are where the disk has them; for reading only.
//!
//! - `open` finds the files that an image is in;
//! - `tables` is what is known of it while it is in use;
//! - `bytes` reads it for whoever waits, and so do helper threads for requests (`channel`);
//! - `storage` is all of it.

mod bytes;
mod channel;
mod open;
mod storage;
mod tables;

pub(in crate::served) use open::open;
pub use open::read_foreign;
