//! qcow2 images, versions 2 and 3.
//!
//! The specification is QEMU's docs/interop/qcow2.rst. The size limits are those of QEMU's
//! block/qcow2.h, so that QEMU and Fathom refuse the same images. All numbers in the file are
//! big-endian. These types encode and decode structures without I/O: the caller reads the bytes,
//! and gets checked values.
//!
//! - [`Header`]: the first cluster, with its [`Extension`]s and the [`FeatureName`]s;
//! - [`Geometry`]: sizes and indexes that follow from the header;
//! - [`L1Entry`], [`L2Entry`] and [`Cluster`], the decoded form of an L2 entry;
//! - [`compress`], [`decompress`]: the contents of compressed clusters;
//! - [`refcount`]: refcount table entries, and refcount blocks of all widths;
//! - [`snapshot`] and [`bitmap`]: the snapshot table and the bitmap directory;
//! - [`Regions`]: the places of metadata, which keep writes from overwriting metadata by mistake.
//!
//! The other modules are the tools for images that are not in use (`driver`).

use crate::HostOffset;

mod backing;
pub mod bitmap;
mod bytes;
mod check;
mod compressed;
mod create;
mod driver;
mod entry;
mod extension;
mod features;
mod geometry;
mod growth;
mod header;
mod image;
mod measure;
pub mod refcount;
mod regions;
mod resize;
pub mod snapshot;
mod stream;

pub(crate) use check::CHECKER;
pub use compressed::{StreamError, compress, decompress};
pub(crate) use driver::Qcow2Driver;
pub use entry::{Cluster, Compressed, EntryError, L1Entry, L2Entry};
pub use extension::{BitmapsExtension, CryptoHeader, Extension};
pub use features::{
    AUTOCLEAR_AT, AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA_FILE, COMPATIBLE_LAZY_REFCOUNTS,
    FeatureKind, FeatureName, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_CORRUPT,
    INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY, INCOMPATIBLE_EXTENDED_L2, encode_feature_names,
    feature_names,
};
pub use geometry::Geometry;
pub use header::{CompressionType, CryptMethod, Header, MAGIC, MAX_HEADER_LEN};
pub(crate) use image::first_cluster;
pub use regions::{Overlap, Region, Regions};
pub use stream::Contents;

/// log2 of the smallest cluster size, 512 bytes.
pub const MIN_CLUSTER_BITS: u32 = 9;
/// log2 of the largest cluster size, 2 MiB.
pub const MAX_CLUSTER_BITS: u32 = 21;
/// log2 of the smallest cluster size whose 32 subclusters have at least 512 bytes each: 16 KiB.
pub const MIN_EXTENDED_L2_CLUSTER_BITS: u32 = 14;
/// Maximum size of an L1 table in bytes.
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// Maximum size of the refcount table in bytes.
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// Maximum number of internal snapshots in an image.
pub const MAX_SNAPSHOTS: u32 = 65536;
/// Maximum size of the snapshot table in bytes.
pub const MAX_SNAPSHOT_TABLE_BYTES: u64 = 64 << 20;
/// Maximum length of a backing file's name in bytes.
pub const MAX_BACKING_NAME: u32 = 1023;
/// Exclusive upper limit of the offsets in L1, L2 and bitmap tables, which have 56 bits.
pub const MAX_HOST_OFFSET: HostOffset = HostOffset(1 << 56);
