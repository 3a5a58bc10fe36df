//! File sizes of new qcow2 images.

use super::bitmap::{Bitmap, FLAG_IN_USE};
use super::create::fully_allocated;
use super::refcount::Extent;
use crate::Result;
use crate::offline::create::{Options, Preallocation};
use crate::offline::measure::{Measure, Source};

pub(super) fn measure(options: &Options, size: u64, source: Option<&Source>) -> Result<Measure> {
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
