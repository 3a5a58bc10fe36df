//! A disk as it was at an instant, to be read while its users go on changing it.
//!
//! - `terms` are what is asked for, and what is told of it;
//! - `keeper` is the thread that keeps in a scratch file what is about to be changed;
//! - `view` is the disk as it was, of what is kept there and of what has not been changed;
//! - `handle` starts and ends it.
//!
//! The disk's users come first: when what was there cannot be kept (the scratch file is as long as it may be, a read
//! fails, it takes too long), the backup has failed, and they go on.

mod handle;
mod keeper;
mod terms;
mod view;

pub use handle::Backup;
pub use terms::{Failed, Status, Terms};
