//! qcow2, versions 2 and 3: its structures as bytes.
//!
//! The specification is QEMU's docs/interop/qcow2.rst; the limits on sizes are
//! those of QEMU's block/qcow2.h, so that both refuse the same images. All
//! numbers in the file are big-endian. No function here does I/O: whoever
//! does says which bytes and gets checked values.
//!
//! - [`Header`]: the first cluster, with its [`Extension`]s and the
//!   [`FeatureName`]s;
//! - [`Geometry`]: sizes and indexes that follow from it;
//! - [`L1Entry`], [`L2Entry`] and what the latter means, [`Cluster`];
//! - [`compress`], [`decompress`]: what a compressed cluster is;
//! - [`refcount`]: refcount table entries, and blocks of all widths;
//! - [`snapshot`] and [`bitmap`]: the snapshot table, the bitmap directory;
//! - [`Regions`]: where metadata is, so that no write hits it by mistake.

use crate::HostOffset;

pub mod bitmap;
mod bytes;
mod compressed;
mod entry;
mod extension;
mod features;
mod geometry;
mod header;
pub mod refcount;
mod regions;
pub mod snapshot;

pub use compressed::{StreamError, compress, decompress};
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
pub use regions::{Overlap, Region, Regions};

/// Cluster sizes: 512 bytes to 2 MiB.
pub const MIN_CLUSTER_BITS: u32 = 9;
/// See [`MIN_CLUSTER_BITS`].
pub const MAX_CLUSTER_BITS: u32 = 21;
/// The smallest cluster that can have 32 subclusters of a sector at least.
pub const MIN_EXTENDED_L2_CLUSTER_BITS: u32 = 14;
/// Bytes of the largest L1 table.
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// Bytes of the largest refcount table.
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// Snapshots of one image.
pub const MAX_SNAPSHOTS: u32 = 65536;
/// Bytes of the largest snapshot table.
pub const MAX_SNAPSHOT_TABLE_BYTES: u64 = 64 << 20;
/// Bytes of a backing file's name.
pub const MAX_BACKING_NAME: u32 = 1023;
/// Where offsets in L1, L2 and bitmap tables end: 56 bits.
pub const MAX_HOST_OFFSET: HostOffset = HostOffset(1 << 56);
