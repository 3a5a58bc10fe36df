//! qcow2 images: header, refcount table and blocks, L1 table, then what is
//! preallocated. Every cluster has refcount one.

use super::{Options, Preallocation, preallocate};
use crate::qcow2::{
    AUTOCLEAR_RAW_DATA_FILE, COMPATIBLE_LAZY_REFCOUNTS, CompressionType, CryptMethod, Extension,
    Geometry, Header, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_EXTENDED_L2,
    L1Entry, L2Entry, MAX_L1_BYTES, MAX_REFCOUNT_TABLE_BYTES, encode_feature_names, feature_names,
    refcount,
};
use crate::{Error, GuestOffset, HostOffset, Result};
use fathom_files::ImageFile;

/// Where everything is, in clusters.
struct Layout {
    table_clusters: u64,
    blocks: u64,
    l1_clusters: u64,
    l2_tables: u64,
    data: u64,
}

impl Layout {
    /// The least refcount blocks that cover everything including themselves.
    fn new(g: &Geometry, l1_entries: u64, preallocated: u64) -> Layout {
        let l2_tables = if preallocated > 0 { l1_entries } else { 0 };
        let mut layout = Layout {
            table_clusters: 1,
            blocks: 1,
            l1_clusters: g.clusters_of(l1_entries * L1Entry::SIZE),
            l2_tables,
            data: if g.data_file { 0 } else { preallocated },
        };
        loop {
            let blocks = layout.total().div_ceil(g.refcount_block_entries());
            let table = g.clusters_of(blocks * refcount::TableEntry::SIZE);
            if (blocks, table) == (layout.blocks, layout.table_clusters) {
                return layout;
            }
            // Both only ever grow.
            (layout.blocks, layout.table_clusters) = (blocks, table);
        }
    }

    fn first_block(&self) -> u64 {
        1 + self.table_clusters
    }

    fn l1(&self) -> u64 {
        self.first_block() + self.blocks
    }

    fn first_l2(&self) -> u64 {
        self.l1() + self.l1_clusters
    }

    fn first_data(&self) -> u64 {
        self.first_l2() + self.l2_tables
    }

    fn total(&self) -> u64 {
        self.first_data() + self.data
    }
}

pub(super) fn create(
    file: &dyn ImageFile,
    data_file: Option<&dyn ImageFile>,
    options: &Options,
    size: u64,
) -> Result<()> {
    let mut header = header_of(options, size);
    let g = header.geometry();
    let l1_entries = g.l1_entries_for(size);
    header.l1_entries = u32::try_from(l1_entries).unwrap_or(u32::MAX);
    let how = preallocation_of(options);
    let preallocated = match how {
        Preallocation::Off => 0,
        _ => g.clusters_of(size),
    };
    let layout = Layout::new(&g, l1_entries, preallocated);
    header.refcount_table_offset = HostOffset(g.cluster_size());
    header.refcount_table_clusters = u32::try_from(layout.table_clusters).unwrap_or(u32::MAX);
    header.l1_offset = HostOffset::of_cluster(layout.l1(), g.cluster_bits);
    if header.refcount_table_bytes() > MAX_REFCOUNT_TABLE_BYTES {
        return Err(Error::usage(
            "the size is too large for preallocation; use larger clusters",
        ));
    }
    let first = encode(&mut header)?;
    // What a reader would refuse is refused before anything is lost.
    let mut cluster = vec![0; g.cluster_size() as usize];
    cluster[..first.len()].copy_from_slice(&first);
    Header::parse(&cluster).map_err(|e| {
        let size = "use a larger cluster_size or a smaller size";
        Error::usage(format!("{e}; {size}"))
    })?;
    write(file, &g, &layout, l1_entries, &header, how)?;
    match data_file {
        Some(data) => {
            data.set_len(0).map_err(failed())?;
            data.set_len(size).map_err(failed())?;
            preallocate(data, how, 0, size)?;
            data.sync().map_err(Error::io("cannot be flushed"))?;
        }
        None => {
            let at = layout.first_data() << g.cluster_bits;
            preallocate(file, how, at, layout.data << g.cluster_bits)?;
        }
    }
    file.sync().map_err(Error::io("cannot be flushed"))?;
    file.write_at(&cluster, 0).map_err(failed())?;
    file.sync().map_err(Error::io("cannot be flushed"))
}

/// Bytes of the file when all of the disk has been written, as QEMU counts them: with an external
/// data file's clusters.
pub fn fully_allocated(options: &Options, size: u64) -> Result<u64> {
    options.validate()?;
    let g = Geometry {
        data_file: false,
        ..header_of(options, size).geometry()
    };
    let l1_entries = g.l1_entries_for(size);
    if l1_entries * L1Entry::SIZE > MAX_L1_BYTES {
        return Err(Error::usage(
            "the size is too large; use a larger cluster_size",
        ));
    }
    let layout = Layout::new(&g, l1_entries, g.clusters_of(size));
    Ok(layout.total() << g.cluster_bits)
}

fn failed() -> impl FnOnce(std::io::Error) -> Error {
    Error::io("cannot be written")
}

/// A raw data file has its clusters where the guest has them, from the start.
fn preallocation_of(options: &Options) -> Preallocation {
    match options.preallocation {
        Preallocation::Off if options.qcow2.data_file_raw => Preallocation::Metadata,
        how => how,
    }
}

fn header_of(options: &Options, size: u64) -> Header {
    let q = &options.qcow2;
    let bit = |on: bool, bit: u64| if on { bit } else { 0 };
    let mut extensions = Vec::new();
    if let Some(format) = options.backing.as_ref().and_then(|b| b.format) {
        extensions.push(Extension::BackingFormat(format.name().into()));
    }
    if let Some(name) = &q.data_file {
        extensions.push(Extension::DataFile(name.clone().into_bytes()));
    }
    if q.version >= 3 {
        extensions.push(Extension::FeatureNames(encode_feature_names(
            &feature_names(),
        )));
    }
    Header {
        version: q.version,
        backing_file: options.backing.as_ref().map(|b| b.name.clone().into()),
        cluster_bits: options.cluster_size.ilog2(),
        size,
        crypt_method: CryptMethod::None,
        l1_entries: 0,
        l1_offset: HostOffset(0),
        refcount_table_offset: HostOffset(0),
        refcount_table_clusters: 0,
        snapshots: 0,
        snapshots_offset: HostOffset(0),
        incompatible: bit(q.data_file.is_some(), INCOMPATIBLE_DATA_FILE)
            | bit(
                q.compression != CompressionType::Deflate,
                INCOMPATIBLE_COMPRESSION,
            )
            | bit(q.extended_l2, INCOMPATIBLE_EXTENDED_L2),
        compatible: bit(q.lazy_refcounts, COMPATIBLE_LAZY_REFCOUNTS),
        autoclear: bit(q.data_file_raw, AUTOCLEAR_RAW_DATA_FILE),
        refcount_order: q.refcount_bits.ilog2(),
        compression: q.compression,
        unknown_fields: Vec::new(),
        extensions,
    }
}

/// Without the feature names, which are a courtesy, where they do not fit.
fn encode(header: &mut Header) -> Result<Vec<u8>> {
    if header.encode().is_err() {
        let kept = |e: &Extension| !matches!(e, Extension::FeatureNames(_));
        header.extensions.retain(kept);
    }
    header.encode()
}

/// Everything but the first cluster.
fn write(
    file: &dyn ImageFile,
    g: &Geometry,
    layout: &Layout,
    l1_entries: u64,
    header: &Header,
    how: Preallocation,
) -> Result<()> {
    file.set_len(0).map_err(failed())?;
    file.set_len(layout.total() << g.cluster_bits)
        .map_err(Error::io("cannot be extended"))?;
    let offset_of = |cluster: u64| HostOffset::of_cluster(cluster, g.cluster_bits);
    let blocks = (0..layout.blocks).map(|i| offset_of(layout.first_block() + i).0);
    let table_at = header.refcount_table_offset;
    write_words(file, g, table_at, layout.table_clusters, blocks)?;
    let mut block = vec![0; g.cluster_size() as usize];
    for i in 0..layout.blocks {
        let first = i << g.refcount_block_bits();
        let used = (layout.total() - first).min(g.refcount_block_entries());
        block.fill(0);
        for entry in 0..used {
            refcount::set(&mut block, g.refcount_order, entry as usize, 1);
        }
        let at = offset_of(layout.first_block() + i);
        file.write_at(&block, at.0).map_err(failed())?;
    }
    let tables =
        (0..layout.l2_tables).map(|i| L1Entry::new(offset_of(layout.first_l2() + i), true).0);
    write_words(file, g, header.l1_offset, layout.l1_clusters, tables)?;
    if how == Preallocation::Off {
        return Ok(());
    }
    let clusters = g.clusters_of(header.size);
    for i in 0..l1_entries {
        let mut table = vec![0; g.cluster_size() as usize];
        let first = i << g.l2_bits();
        for index in 0..(clusters - first).min(g.l2_entries()) {
            let host = match g.data_file {
                true => GuestOffset::of_cluster(first + index, g.cluster_bits).in_data_file(),
                false => offset_of(layout.first_data() + first + index),
            };
            let mut entry = L2Entry::data(g, host, true);
            // Where subclusters can say it, what is only reserved does not
            // hide the backing file. A raw data file's contents always count.
            if !header.data_file_is_raw() {
                entry.bitmap = 0;
            }
            entry.encode(&mut table, (index * g.l2_entry_size()) as usize, g);
        }
        let at = offset_of(layout.first_l2() + i);
        file.write_at(&table, at.0).map_err(failed())?;
    }
    Ok(())
}

/// Writes a table of 64-bit numbers, padded with zeroes to whole clusters.
fn write_words(
    file: &dyn ImageFile,
    g: &Geometry,
    offset: HostOffset,
    clusters: u64,
    mut words: impl Iterator<Item = u64>,
) -> Result<()> {
    let mut cluster = vec![0; g.cluster_size() as usize];
    for i in 0..clusters {
        cluster.fill(0);
        let mut used = 0;
        for (slot, word) in cluster.chunks_exact_mut(8).zip(&mut words) {
            slot.copy_from_slice(&word.to_be_bytes());
            used += 8;
        }
        let at = offset + (i << g.cluster_bits);
        write_padded(file, &cluster, used, at)?;
    }
    Ok(())
}

/// Writes a cluster that is zeroes from `used` on. A hole reads as zeroes without being written,
/// which saves nearly all of a large cluster; a device has there what it had before.
fn write_padded(file: &dyn ImageFile, cluster: &[u8], used: usize, at: HostOffset) -> Result<()> {
    let used = used.next_multiple_of(4096).min(cluster.len());
    let rest = cluster.len() - used;
    let written = match file.is_hole((at + used as u64).0, rest as u64) {
        true => used,
        false => cluster.len(),
    };
    file.write_at(&cluster[..written], at.0).map_err(failed())
}
