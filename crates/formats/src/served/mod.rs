//! Serving images: raw, qcow2 and QED, with the files that they name.
//!
//! A format only answers where a guest's byte lives; the data's I/O is the
//! storage's. One request's way: [`channel`] looks its place up
//! ([`lookup`]) and passes it on to the storage, at that place. What cannot be
//! told at once becomes a task ([`task`]), whose operations are children of the
//! request ([`worker_io`]): [`read`], [`write`], [`compress`], [`zero`],
//! [`copy_up`] and [`write_back`]. So is what a worker does for nobody's request ([`jobs`]): [`resize`].
//!
//! Before an image is used, its chain is as it is now ([`follow`]), not as it was when it was [opened](open).
//! What all workers share is [`active`]: for each image of the chain its
//! [`tables`], of which [`cache`] holds [`slice`]s, and the free space
//! ([`alloc`]). What is not on disk is in the [`journal`], too, by which a
//! successor can [`restore`] it. qcow2 and QED differ in [`layout`] and in their free space only.
//!
//! # Requests
//!
//! - A read whose table entries are in memory takes no lock and writes no memory that other workers
//!   write. The request keeps its slot and its buffers. Only its place (`at`) and its storage
//!   (`memo`) change.
//! - Every other read is a task. The task reads missing slices into the cache that all workers
//!   share, starts an operation for each place, and completes the request when all operations have
//!   ended. If several workers need the same slice, one reads it and the others wait.
//! - The documentation of `write` describes writes that allocate, that of `write_back` flushes, and
//!   that of `epoch` the reuse of freed clusters.
//! - Whatever contradicts the format marks the image as corrupt and ends all writes (`corrupt`).

mod activate;
mod active;
mod alloc;
mod alone;
#[cfg(test)]
mod bed;
mod beside;
mod cache;
mod channel;
mod compress;
mod condition;
mod copy_up;
mod corrupt;
mod counts;
#[cfg(test)]
mod damage_tests;
mod dirty_state;
mod disk;
mod epoch;
mod follow;
mod foreign;
pub(crate) mod helpers;
mod io;
mod jobs;
mod journal;
mod l1;
mod layout;
mod locks;
mod lookup;
mod map;
mod memo;
mod metadata;
mod metadata_only;
mod missing;
mod open;
mod open_mark;
mod options;
mod own_bitmaps;
mod pool;
mod problem;
#[cfg(test)]
mod race;
#[cfg(test)]
mod race_tests;
mod read;
mod rebase;
mod resize;
mod resizing;
mod restore;
mod sealed;
mod segments;
mod slice;
mod status;
mod storage;
mod tables;
mod task;
mod worker_io;
mod write;
mod write_back;
mod zero;

pub use beside::{Beside, BesideDisk, ChainImage};
pub use condition::ImageProblem;
pub use counts::ImageCounts;
pub use disk::ImageDisk;
pub use foreign::read_foreign;
pub use map::{Extents, Host, MapExtent, Mapper};
pub use open::MAX_CHAIN;
pub use options::{DEFAULT_METADATA_CACHE, ImageOptions, OwnBitmaps};
pub use own_bitmaps::OwnBitmap;
pub use resizing::Resizing;
pub use sealed::Keys;
pub use storage::{EndGuard, Opener, Storage};
