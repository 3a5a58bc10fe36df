//! QED images.
//!
//! The specification is QEMU's docs/interop/qed_spec.rst. All numbers in the file are
//! little-endian. These types encode and decode structures without I/O:
//!
//! - [`Header`]: the first bytes, and the place of the backing file's name;
//! - [`Geometry`]: sizes and indexes that follow from the header;
//! - [`L2Offset`] and [`Cluster`]: entries of the two levels of tables.
//!
//! The other modules are the tools for images that are not in use (`driver`).

mod backing;
mod check;
mod create;
mod driver;
mod header;
mod image;
mod resize;
mod table;

pub(crate) use driver::QedDriver;
pub use header::{
    FEATURE_BACKING_FILE, FEATURE_BACKING_FORMAT_NO_PROBE, FEATURE_NEED_CHECK, HEADER_LEN, Header,
    MAGIC, MAX_BACKING_NAME,
};
pub use image::QedImage;
pub use table::{Cluster, Geometry, L2Offset, TableError};

/// Valid cluster sizes in bytes.
pub const CLUSTER_SIZES: std::ops::RangeInclusive<u32> = 1 << 12..=1 << 26;
/// Valid table sizes in clusters.
pub const TABLE_SIZES: std::ops::RangeInclusive<u32> = 1..=16;
/// Cluster size in bytes of new images.
pub const DEFAULT_CLUSTER_SIZE: u32 = 64 << 10;
/// Table size in clusters of new images.
pub const DEFAULT_TABLE_SIZE: u32 = 4;
