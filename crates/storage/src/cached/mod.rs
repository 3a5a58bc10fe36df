//! A remote base image, fetched to this host on demand.
//!
//! The image's stripes are stored in a cache, which all disks of this host with the image share.
//! The cache has a *keeper*, a separate process. `finder` finds or starts the keeper on the `terms`
//! of the first user of the image. Only the keeper fetches, checks and writes data; all others read
//! what the cache has:
//!
//! - the keeper hands out two read-only files: the data, and a map of the stripes in the cache
//!   (`live`);
//! - a worker's `channel` reads the data like any file if the map shows the stripes as present, and
//!   checks the map again after the read;
//! - missing stripes are requested by a message (`wire`), and `stripe_notifier`s notify the waiting
//!   readers when they arrive. `link` is the thread that listens to the keeper, and finds another
//!   keeper when it ends;
//! - `touched` records which stripes are used. The keeper keeps those longest, and fetches them
//!   first the next time.

mod bytes;
mod channel;
mod disk;
pub mod finder;
mod link;
pub mod live;
mod place;
mod shared;
mod stripe_notifier;
mod terms;
mod touched;
mod view;
pub mod wire;

pub(crate) use place::KIND;
pub use terms::{CacheTerms, FetchRate, MIN_SIZE, Terms};
