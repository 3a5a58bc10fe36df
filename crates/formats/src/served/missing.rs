//! Finds clusters beyond the end of the file that an image's tables refer to.
//!
//! A file with such clusters was truncated. The guest's data there is lost, and the next writer of
//! the image would put new data where the tables expect the old. This search runs at each start and
//! must cost next to nothing. The search therefore first looks at refcounts: only at the few that
//! count clusters beyond the end. (The refcounts may be nonzero for clusters that no table refers
//! to: a power cut leaves such leaks.)

use super::layout::Layout;
use super::storage::Storage;
use super::tables::Parts;
use crate::qcow2::refcount::get;
use crate::qcow2::{Cluster, Geometry, L2Entry};
use crate::{Error, GuestOffset, HostOffset, Result};

/// A guest cluster whose host cluster is beyond the end of the file.
pub(super) struct Missing {
    guest: GuestOffset,
    host: HostOffset,
    /// Length of the file in bytes.
    len: u64,
}

impl Missing {
    /// Finds the first missing cluster of an image with refcount blocks at these offsets.
    pub(super) fn find(
        file: &dyn Storage,
        data: &dyn Storage,
        parts: &Parts,
        g: &Geometry,
        blocks: &[u64],
    ) -> Result<Option<Missing>> {
        let unreadable = Error::io("cannot read its tables");
        let len = match parts.has_data_file {
            true => data.bytes().len().map_err(unreadable)?,
            false => parts.file_len,
        };
        let end = HostOffset(len).up_to(g.cluster_size());
        let may_miss = match parts.has_data_file {
            // (In an external data file each cluster is at its guest offset.)
            true => end.0 < parts.size,
            false => counts_behind(file, g, blocks, end)?,
        };
        match may_miss {
            true => in_tables(file, parts, g, len, end),
            false => Ok(None),
        }
    }

    /// Returns the error for an image that is not opened for writing.
    pub(super) fn refused(&self) -> Error {
        let Missing { guest, host, len } = self;
        Error::invalid(format!(
            "not opened for writing: its file is truncated at {len} bytes (the disk's byte \
             {guest:#x} is at {host:#x} of the file); restore the file from a backup, serve it \
             with --readonly (reads of the missing data fail), or serve it with \
             --zero-missing-clusters (the missing data reads as zeroes)"
        ))
    }
}

/// Returns whether a cluster from `end` on has a nonzero refcount.
fn counts_behind(
    file: &dyn Storage,
    g: &Geometry,
    blocks: &[u64],
    end: HostOffset,
) -> Result<bool> {
    let first = end.cluster(g.cluster_bits);
    let entries = g.refcount_block_entries();
    let number = first / entries;
    let mut bytes = Vec::new();
    for (block, at) in (0..).zip(blocks).skip(number as usize) {
        if *at == 0 {
            continue;
        }
        bytes.resize(g.cluster_size() as usize, 0);
        let read = file.bytes().read_at(&mut bytes, *at);
        read.map_err(Error::io("cannot read its refcounts"))?;
        let from = if block == number { first % entries } else { 0 };
        if (from..entries).any(|index| get(&bytes, g.refcount_order, index as usize) != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the first entry of the L2 tables that refers to a cluster from `end` on.
fn in_tables(
    file: &dyn Storage,
    parts: &Parts,
    g: &Geometry,
    len: u64,
    end: HostOffset,
) -> Result<Option<Missing>> {
    let layout = Layout::Qcow2(*g);
    let mut bytes = vec![0; layout.table_bytes() as usize];
    let words = layout.entry_words();
    let entries = layout.slice_entries() * layout.slices_per_table();
    for (number, entry) in (0..).zip(&parts.l1) {
        // (An invalid entry is found and reported when it is used.)
        let Ok(Some(table)) = layout.table(*entry, parts.file_len) else {
            continue;
        };
        let read = file.bytes().read_at(&mut bytes, table.0);
        read.map_err(Error::io("cannot read its tables"))?;
        let (numbers, _) = bytes.as_chunks::<8>();
        for (index, entry) in (0..).zip(numbers.chunks_exact(words)) {
            let entry = L2Entry {
                descriptor: layout.word(entry[0]),
                bitmap: entry.get(1).map_or(0, |bitmap| layout.word(*bitmap)),
            };
            let guest = GuestOffset::of_cluster(number * entries + index, g.cluster_bits);
            let host = match layout.decode(entry, guest, parts.file_len) {
                Ok(Cluster::Data { host }) => host,
                Ok(Cluster::Compressed(range)) => range.offset,
                Ok(Cluster::Subclusters {
                    host: Some(host),
                    allocated,
                    ..
                }) if allocated != 0 => host,
                _ => continue,
            };
            if host >= end {
                return Ok(Some(Missing { guest, host, len }));
            }
        }
    }
    Ok(None)
}
