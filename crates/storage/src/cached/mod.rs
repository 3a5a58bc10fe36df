//! A base image that is far away, and comes to this host as it is needed.
//!
//! Its stripes are kept in a cache, which all disks of this host that have the image share. The cache has a
//! *keeper*, a process of its own, which is found, or started, by `finder` on the `terms` of the first who wants
//! the image. Only the keeper fetches, checks and writes; everybody else reads what is there:
//!
//! - the keeper hands out two files that can only be read: the data, and a map of what is `live`;
//! - a worker's `channel` reads the data as from any file, if the map says that it is there, and looks at the map
//!   once more when it has it;
//! - what is not there is asked for by a message (`wire`), and `bell`s ring when it has come. `link` is the thread
//!   that listens, and finds another keeper when there is none;
//! - `touched` notes what is used: that is kept longest, and fetched first the next time.

mod bell;
mod bytes;
mod channel;
mod disk;
pub mod finder;
mod link;
pub mod live;
mod place;
mod shared;
mod terms;
mod touched;
mod view;
pub mod wire;

pub(crate) use place::KIND;
pub use terms::{CacheTerms, FetchRate, MIN_SIZE, Terms};
