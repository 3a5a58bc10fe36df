//! Serves raw, qcow2 and QED images together with the files that they name.
//!
//! A format only maps guest offsets to host offsets; the storage does the data's I/O. For each
//! request, [`channel`] looks the guest offset up ([`lookup`]) and passes the request to the
//! storage at the host offset. A request that needs more than one look-up in memory becomes a task
//! ([`task`]), whose operations are children of the request ([`worker_io`]): [`read`], [`write`],
//! [`compress`], [`zero`], [`copy_up`] and [`write_back`]. A worker's work without a request
//! ([`jobs`]) is a task, too: [`resize`].
//!
//! Before an image is used, its chain is read again ([`follow`]), since the chain may have changed
//! after it was [opened](open). All workers share [`active`]. For each image of the chain it holds
//! the [`tables`], whose [`slice`]s are in the [`cache`], and the free space ([`alloc`]). Changes
//! that are not on disk are also in the [`journal`], from which a successor can [`restore`] them.
//! qcow2 and QED differ in [`layout`] and in their free space only.
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
//! - Anything that contradicts the format marks the image as corrupt and ends all writes
//!   (`corrupt`).

mod activate;
mod active;
mod alloc;
mod alone;
#[cfg(test)]
mod bed;
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
mod encrypted;
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
mod segments;
mod side_view;
mod slice;
mod split;
mod status;
mod storage;
mod tables;
mod task;
mod worker_io;
mod write;
mod write_back;
mod zero;

pub use condition::ImageProblem;
pub use counts::ImageCounts;
pub use disk::ImageDisk;
pub use encrypted::Keys;
pub use foreign::read_foreign;
pub use map::{Extents, Host, MapExtent, Mapper};
pub use open::MAX_CHAIN;
pub use options::{DEFAULT_METADATA_CACHE, ImageOptions, OwnBitmaps};
pub use own_bitmaps::OwnBitmap;
pub use resizing::Resizing;
pub use side_view::{ChainImage, SideView, SideViewKind};
pub use storage::{EndGuard, Opener, Storage};
