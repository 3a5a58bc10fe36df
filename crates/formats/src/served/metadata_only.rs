//! Detects qcow2 images with many allocated clusters that are holes in the file.

use crate::Image;
use crate::qcow2::refcount::{self, TableEntry};
use crate::{Error, Format, Result};
use fathom_files::ImageFile;

/// Returns whether clearly more clusters have a refcount than the file has space for.
///
/// The result is true after `preallocation=metadata`, for example. If true, the caller should ask
/// the file which clusters are holes. Never true for QED images. Uses the same threshold as QEMU.
pub(super) fn has_metadata_only(file: &dyn ImageFile) -> Result<bool> {
    if Format::probe(file)? != Format::Qcow2 {
        return Ok(false);
    }
    let Image::Qcow2(header) = Image::read(file, Format::Qcow2)? else {
        return Ok(false);
    };
    let g = header.geometry();
    let (len, allocated) = (file.len(), file.allocated());
    let len = len.map_err(Error::io("cannot read its size"))?;
    let allocated = allocated.map_err(Error::io("cannot read its size"))?;
    let real = allocated / g.cluster_size();
    let enough = (real * 10 / 9).max(real + 2);
    let clusters = g.clusters_of(len);
    let mut table = vec![0; header.refcount_table_bytes() as usize];
    let unreadable = "cannot read its refcounts";
    file.read_at(&mut table, header.refcount_table_offset.0)
        .map_err(Error::io(unreadable))?;
    let per_block = g.refcount_block_entries();
    let mut block = vec![0; g.cluster_size() as usize];
    let mut used = 0;
    for (number, entry) in (0..clusters.div_ceil(per_block)).zip(table.as_chunks::<8>().0) {
        let entry = TableEntry(u64::from_be_bytes(*entry));
        let at = entry.block(&g).map_err(|e| Error::invalid(e.to_string()))?;
        let Some(at) = at else {
            continue;
        };
        file.read_at(&mut block, at.0)
            .map_err(Error::io(unreadable))?;
        let entries = per_block.min(clusters - number * per_block) as usize;
        let in_use = |i: &usize| refcount::get(&block, g.refcount_order, *i) > 0;
        used += (0..entries).filter(in_use).count() as u64;
        if used >= enough {
            return Ok(true);
        }
    }
    Ok(used >= enough)
}
