//! `fathom img measure`: computes the file size of a new image.

use super::create::{Options, Preallocation, fully_allocated};
use crate::qcow2::bitmap::{Bitmap, FLAG_IN_USE};
use crate::qcow2::refcount::Extent;
use crate::served::MapExtent;
use crate::{Error, Format, Result};
use serde_json::{Value, json};
use std::fmt;

/// File sizes in bytes; QEMU's `BlockMeasureInfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure {
    /// Size with the data of the source.
    pub required: u64,
    /// Size when the whole disk has been written.
    pub fully_allocated: u64,
    /// Additional size of the bitmaps; `None` if the source or the target cannot have bitmaps.
    pub bitmaps: Option<u64>,
}

/// The contents that will be copied to the image.
#[derive(Clone, Debug)]
pub struct Source {
    /// Number of bytes of data clusters. See [`data_clusters`], with the cluster size of the new
    /// image.
    pub data: u64,
    /// The bitmaps of the source; `None` if its format has no bitmaps.
    pub bitmaps: Option<Vec<Bitmap>>,
}

/// Measures a new image with these options for a disk of `size` bytes. Without a source, the image
/// is empty. With a backing file, all data is counted, because the data shared with the source is
/// unknown.
pub fn measure(options: &Options, size: u64, source: Option<&Source>) -> Result<Measure> {
    let size = size
        .checked_next_multiple_of(512)
        .filter(|size| *size <= i64::MAX as u64)
        .ok_or_else(|| Error::usage("the size exceeds the limit"))?;
    match options.format {
        Format::Raw => Ok(Measure {
            required: size,
            fully_allocated: size,
            bitmaps: None,
        }),
        Format::Luks => {
            let bytes = size.saturating_add(options.encryption.header_len());
            Ok(Measure {
                required: bytes,
                fully_allocated: bytes,
                bitmaps: None,
            })
        }
        Format::Foreign(_) => Err(Error::only_read(options.format)),
        Format::Qcow2 => qcow2(options, size, source),
        Format::Qed => Err(Error::unsupported(
            "qed images cannot be measured, only raw, qcow2 and luks images",
        )),
    }
}

fn qcow2(options: &Options, size: u64, source: Option<&Source>) -> Result<Measure> {
    let full = fully_allocated(options, size)?;
    let cluster = options.cluster_size;
    let total = full.clusters * cluster;
    let whole = size.next_multiple_of(cluster);
    let is_allocated = matches!(
        options.preallocation,
        Preallocation::Falloc | Preallocation::Full
    );
    let data = match source {
        _ if is_allocated => whole,
        Some(_) if options.backing.is_some() => whole,
        Some(source) => source.data,
        None => 0,
    };
    let bitmaps = source.and_then(|source| source.bitmaps.as_ref());
    let bitmaps = bitmaps.filter(|_| options.qcow2.version >= 3);
    Ok(Measure {
        required: total - whole + data,
        fully_allocated: total,
        bitmaps: bitmaps.map(|bitmaps| match bitmap_bytes(bitmaps, size, cluster) {
            0 => 0,
            bytes => {
                let clusters = bytes / cluster;
                let refcounts = refcount_clusters(options, &full, clusters);
                (clusters + refcounts) * cluster
            }
        }),
    })
}

/// Returns the number of clusters for refcounts while `clusters` clusters of bitmaps are added to a
/// complete image. Changed blocks and the table get new places before their old ones are free.
fn refcount_clusters(options: &Options, image: &Extent, clusters: u64) -> u64 {
    let per_block = options.cluster_size * 8 / options.qcow2.refcount_bits;
    let mut blocks = 0;
    loop {
        let new = clusters + blocks + 2 * (image.table_clusters + 1);
        // The new clusters may begin and end within blocks, and so may the old table. The first
        // block counts the clusters that `create` has placed.
        let changed =
            new.div_ceil(per_block) + 1 + image.table_clusters.div_ceil(per_block) + 1 + 1;
        let table = (image.blocks + changed) * 8 / options.cluster_size + 1;
        if changed == blocks {
            // The table gets a second new place if the first one is too small for the blocks.
            return blocks + 2 * table.max(image.table_clusters);
        }
        blocks = changed;
    }
}

/// Returns the size in bytes of all bitmaps that a copy would have, with all bits stored.
fn bitmap_bytes(bitmaps: &[Bitmap], size: u64, cluster: u64) -> u64 {
    let mut directory = 0;
    let mut bytes = 0;
    for bitmap in bitmaps.iter().filter(|b| b.flags & FLAG_IN_USE == 0) {
        let clusters = bitmap.bytes_for(size).div_ceil(cluster);
        bytes += clusters * cluster + (clusters * 8).next_multiple_of(cluster);
        directory += bitmap.encoded_len();
    }
    bytes + directory.next_multiple_of(cluster)
}

/// Returns the total size in bytes of all clusters of `cluster_size` bytes (a power of two) that
/// contain data. `extents` must cover the whole disk.
pub fn data_clusters<E>(
    extents: impl Iterator<Item = std::result::Result<MapExtent, E>>,
    cluster_size: u64,
) -> std::result::Result<u64, E> {
    let (mut bytes, mut end) = (0, 0);
    for extent in extents {
        let extent = extent?;
        if extent.data && !extent.zero {
            let start = (extent.start & !(cluster_size - 1)).max(end);
            end = (extent.start + extent.len).next_multiple_of(cluster_size);
            bytes += end - start.min(end);
        }
    }
    Ok(bytes)
}

impl Measure {
    /// Returns the fields of `qemu-img measure --output=json`, by QEMU's names.
    pub fn to_json(&self) -> Value {
        let mut value = json!({
            "required": self.required,
            "fully-allocated": self.fully_allocated,
        });
        if let Some(bitmaps) = self.bitmaps {
            value["bitmaps"] = bitmaps.into();
        }
        value
    }
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "required size: {}", self.required)?;
        writeln!(f, "fully allocated size: {}", self.fully_allocated)?;
        if let Some(bitmaps) = self.bitmaps {
            writeln!(f, "bitmaps size: {bitmaps}")?;
        }
        Ok(())
    }
}
