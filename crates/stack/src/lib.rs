//! From a disk's description to a running disk: its storage, the format of its image with all that
//! the image names, its filters, and its workers.
//!
//! [`Description`] is what users say; [`Stack::open`] makes the disk. On the way: `confined` opens
//! what images name, in the directories that they may use; `image_files` are an image's files as the
//! formats use them; `cow` puts an overlay over an image; `filters` are those of one disk; `inject`
//! delays on purpose; a `layer` is a new image on top of another one; `held` has users wait, for all of the disk or for what is `missing` of it;
//! at the `tap`, below the filters, what users change is marked in the `bitmaps`, and waits until it is kept as it
//! was in the `past`, or until a `brake` lets it (`bells` tell when); `pools` are threads that disks share. `client` is for whoever reads and writes a disk
//! as a guest does, but waits.
//!
//! Who uses the disk, and how they come to it, is not known here.
//!
//! A request passes the layers from the outside in: `held` (if users wait), the storages'
//! `ByteDisk` (if requests of any bytes are possible), the filters in the order of their options,
//! `inject`, the `tap`, the image, and its storage.

mod bare;
mod bells;
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
mod pages;
mod past;
mod pools;
mod stack;
mod tap;

pub use bitmaps::{BitmapStatus, Bitmaps, Dirty, check_bitmap_name};
pub use blocks::{block_of, words_of};
pub use brake::Brake;
pub use client::{Answer, Ask, Client, Job};
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
pub use pages::Pages;
pub use past::Past;
pub use pools::{PoolOptions, Pools};
pub use stack::{Error, Hold, Stack, Unserved, check_raw, open_below, open_unserved};
pub use tap::Tap;
