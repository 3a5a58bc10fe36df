//! Builds a running disk from its description: the storage, the image format with all files that
//! the image names, the filters and the workers.
//!
//! [`Description`] is what users specify, and [`Stack::open`] opens the disk. The modules:
//!
//! - `confined` opens the files that images name, in the allowed directories;
//! - `image_files` are an image's files as the formats use them;
//! - `cow` puts an overlay on an image, and `layer` creates a new image on top of another one;
//! - `filters` are those of one disk, and `inject` delays requests on purpose;
//! - `held` makes users wait for the whole disk, or for the blocks that are `missing`;
//! - the `tap`, below the filters, marks changes in the `bitmaps`. Writes wait in the tap until the
//!   `past` has saved the original data, or until a `brake` lets them pass; `notifiers` wake them;
//! - `pools` are threads that disks share;
//! - `client` lets a thread read and write a disk as a guest does, but synchronously.
//!
//! This crate does not know who uses a disk, or by which protocol.
//!
//! A request passes the layers from the outside in: `held` (if users wait), the storage's
//! `ByteDisk` (if requests at any byte offset are possible), the filters in the order of their
//! options, `inject`, the `tap`, the image, and its storage.

mod bare;
mod bitmaps;
mod blocks;
mod brake;
mod client;
mod confined;
mod cow;
mod cpus;
mod description;
mod filters;
mod held;
mod image_files;
mod inject;
mod keys;
mod layer;
mod magic;
mod marking;
mod missing;
mod notifiers;
mod past;
mod pools;
mod stack;
mod tap;

pub use bitmaps::{BitmapStatus, Bitmaps, Dirty, check_bitmap_name};
pub use blocks::{block_of, words_of};
pub use brake::Brake;
pub use client::{Client, DiskReply, DiskRequest, Job};
pub use confined::{AllowedDirs, data_file, no_data_file};
pub use cpus::CpuList;
pub use description::{Description, parse_format};
pub use filters::{DiskFilters, FilterInfo, position_of_filter};
pub use held::Latch;
pub use image_files::{ImageOpener, StoredImage, seen_from};
pub use inject::{Injected, Injection, Injector};
pub use keys::{KeyRing, KeySource};
pub use layer::{make_layer, name_from};
pub use marking::MarkedImage;
pub use missing::Missing;
pub use past::Past;
pub use pools::{PoolOptions, Pools};
pub use stack::{Error, Hold, Stack, Unserved, check_raw, open_below, open_unserved};
pub use tap::Tap;
