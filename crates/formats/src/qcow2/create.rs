//! Creates qcow2 images: header, refcount table and blocks, L1 table, then the preallocated
//! clusters. Every cluster has refcount one.

use super::{
    AUTOCLEAR_RAW_DATA_FILE, COMPATIBLE_LAZY_REFCOUNTS, CompressionType, CryptMethod, CryptoHeader,
    Extension, Geometry, Header, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_DATA_FILE,
    INCOMPATIBLE_EXTENDED_L2, L1Entry, L2Entry, MAX_L1_BYTES, MAX_REFCOUNT_TABLE_BYTES,
    encode_feature_names, feature_names,
    refcount::{self, Extent},
};
use crate::offline::create::{
    ENCRYPTION_PREFIX, NewImage, Options, Preallocation, check_preallocation, empty, preallocate,
};
use crate::{Error, GuestOffset, HostOffset, Result};
use fathom_files::ImageFile;

/// The layout of a new image, in clusters.
struct Layout {
    table_clusters: u64,
    blocks: u64,
    l1_clusters: u64,
    encryption: u64,
    l2_tables: u64,
    data: u64,
}

impl Layout {
    /// Computes the layout with the fewest refcount blocks that cover everything, including
    /// themselves.
    fn new(g: &Geometry, l1_entries: u64, encryption: u64, l2_tables: u64, data: u64) -> Layout {
        let mut layout = Layout {
            table_clusters: 1,
            blocks: 1,
            l1_clusters: g.clusters_of(l1_entries * L1Entry::SIZE),
            encryption: g.clusters_of(encryption),
            l2_tables,
            data,
        };
        loop {
            let blocks = layout.total().div_ceil(g.refcount_block_entries());
            let table = g.clusters_of(blocks * refcount::TableEntry::SIZE);
            if (blocks, table) == (layout.blocks, layout.table_clusters) {
                return layout;
            }
            // Both numbers only grow, so the loop ends.
            (layout.blocks, layout.table_clusters) = (blocks, table);
        }
    }

    fn first_block(&self) -> u64 {
        1 + self.table_clusters
    }

    fn l1(&self) -> u64 {
        self.first_block() + self.blocks
    }

    fn encryption(&self) -> u64 {
        self.l1() + self.l1_clusters
    }

    fn first_l2(&self) -> u64 {
        self.encryption() + self.encryption
    }

    fn first_data(&self) -> u64 {
        self.first_l2() + self.l2_tables
    }

    fn total(&self) -> u64 {
        self.first_data() + self.data
    }

    fn extent(&self) -> Extent {
        Extent {
            clusters: self.total(),
            blocks: self.blocks,
            table_clusters: self.table_clusters,
        }
    }
}

/// The structures of a new image, without its data.
pub(super) struct Plan {
    header: Header,
    layout: Layout,
    /// The image's first cluster.
    pub(super) first: Vec<u8>,
}

impl Plan {
    /// Plans an image with `l2_tables` L2 tables and `data` clusters of data.
    pub(super) fn new(options: &Options, size: u64, l2_tables: u64, data: u64) -> Result<Plan> {
        let mut header = header_of(options, size);
        let g = header.geometry();
        let l1_entries = g.l1_entries_for(size);
        header.l1_entries = u32::try_from(l1_entries).unwrap_or(u32::MAX);
        let encryption = encryption_len(options);
        let layout = Layout::new(&g, l1_entries, encryption, l2_tables, data);
        if encryption > 0 {
            header.crypt_method = CryptMethod::Luks;
            header.extensions.push(Extension::Crypto(CryptoHeader {
                offset: HostOffset::of_cluster(layout.encryption(), g.cluster_bits),
                len: encryption,
            }));
        }
        header.refcount_table_offset = HostOffset(g.cluster_size());
        header.refcount_table_clusters = u32::try_from(layout.table_clusters).unwrap_or(u32::MAX);
        header.l1_offset = HostOffset::of_cluster(layout.l1(), g.cluster_bits);
        if header.refcount_table_bytes() > MAX_REFCOUNT_TABLE_BYTES {
            return Err(Error::usage(
                "its refcount table would exceed the limit; use a larger cluster_size",
            ));
        }
        let encoded = encode(&mut header)?;
        // Refuses what a reader would refuse, before the file's contents are lost.
        let mut first = vec![0; g.cluster_size() as usize];
        first[..encoded.len()].copy_from_slice(&encoded);
        Header::parse(&first).map_err(|e| {
            let size = "use a larger cluster_size or a smaller size";
            Error::usage(format!("{e}; {size}"))
        })?;
        Ok(Plan {
            header,
            layout,
            first,
        })
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.header.geometry()
    }

    fn offset_of(&self, cluster: u64) -> HostOffset {
        HostOffset::of_cluster(cluster, self.header.cluster_bits)
    }

    /// Returns the offset of data cluster `number`.
    pub(super) fn data(&self, number: u64) -> HostOffset {
        self.offset_of(self.layout.first_data() + number)
    }

    /// Passes all clusters except the first one and the data to `put`, in file order. `indexes` are
    /// the indexes of the L2 tables in the L1 table.
    pub(super) fn put_tables(
        &self,
        indexes: impl Iterator<Item = u64>,
        tables: impl Iterator<Item = Vec<u8>>,
        put: &mut Put<'_>,
    ) -> Result<()> {
        let (g, layout) = (self.geometry(), &self.layout);
        let blocks = (0..layout.blocks).map(|i| (i, self.offset_of(layout.first_block() + i).0));
        put_words(&g, 1, layout.table_clusters, blocks, self, put)?;
        let mut block = vec![0; g.cluster_size() as usize];
        for i in 0..layout.blocks {
            let first = i << g.refcount_block_bits();
            let used = (layout.total() - first).min(g.refcount_block_entries());
            block.fill(0);
            for entry in 0..used {
                refcount::set(&mut block, g.refcount_order, entry as usize, 1);
            }
            put(
                self.offset_of(layout.first_block() + i),
                &block,
                block.len(),
            )?;
        }
        let l2 = (layout.first_l2()..).map(|cluster| L1Entry::new(self.offset_of(cluster), true).0);
        put_words(
            &g,
            layout.l1(),
            layout.l1_clusters,
            indexes.zip(l2),
            self,
            put,
        )?;
        for (cluster, table) in (layout.first_l2()..).zip(tables) {
            put(self.offset_of(cluster), &table, table.len())?;
        }
        Ok(())
    }
}

/// A function that receives a cluster: its offset, its bytes, and the number of bytes before the
/// zeroes at its end.
pub(super) type Put<'a> = dyn FnMut(HostOffset, &[u8], usize) -> Result<()> + 'a;

/// Validates the options of a new image that do not depend on the disk's size.
pub(super) fn validate(options: &Options) -> Result<()> {
    let (cluster, q) = (options.cluster_size, &options.qcow2);
    let refuse = |problem: &str| Err(Error::usage(problem));
    if !cluster.is_power_of_two() || !(512..=2 << 20).contains(&cluster) {
        return refuse("cluster_size: not a power of two from 512 to 2M");
    }
    if !q.refcount_bits.is_power_of_two() || q.refcount_bits > 64 {
        return refuse("refcount_bits: not a power of two from 1 to 64");
    }
    if q.extended_l2 && cluster < 16 << 10 {
        return refuse("extended_l2=on: needs a cluster_size of at least 16k");
    }
    let needs_v3 = [
        (q.refcount_bits != 16, "refcount_bits other than 16"),
        (q.lazy_refcounts, "lazy_refcounts=on"),
        (q.extended_l2, "extended_l2=on"),
        (
            q.compression != CompressionType::Deflate,
            "compression_type other than zlib",
        ),
        (q.data_file.is_some(), "data_file"),
    ];
    if let Some((_, what)) = needs_v3.iter().find(|(wanted, _)| *wanted && q.version < 3) {
        return Err(Error::usage(format!("{what} needs compat=1.1")));
    }
    if q.data_file_raw && q.data_file.is_none() {
        return refuse("data_file_raw=on: needs data_file");
    }
    if q.data_file_raw && options.backing.is_some() {
        return refuse("data_file_raw=on: excludes a backing file");
    }
    if q.data_file
        .as_deref()
        .is_some_and(|n| n.is_empty() || n.contains('\0'))
    {
        return refuse("the data file's name is invalid");
    }
    let preallocates = options.preallocation != Preallocation::Off;
    let encrypts = options.encryption.is_wanted;
    if !encrypts
        && options
            .given()
            .any(|name| name.starts_with(ENCRYPTION_PREFIX))
    {
        return refuse("options of encryption: need encrypt.format=luks");
    }
    if encrypts && preallocates {
        return refuse(
            "preallocation: excludes encryption, because preallocated data would read as \
             random bytes",
        );
    }
    if encrypts && q.data_file.is_some() {
        return refuse("encrypt.format: excludes data_file");
    }
    if preallocates && options.backing.is_some() && !q.extended_l2 {
        return refuse("preallocation: needs extended_l2=on for an image with a backing file");
    }
    Ok(())
}

pub(super) fn create(new: &NewImage) -> Result<()> {
    let (file, data_file, options, size) = (new.file, new.data_file, new.options, new.size);
    let encryption = match options.encryption.is_wanted {
        true => options.encryption.header(new.key)?,
        false => Vec::new(),
    };
    let g = header_of(options, size).geometry();
    let how = preallocation_of(options);
    let (l2_tables, preallocated) = match how {
        Preallocation::Off => (0, 0),
        _ => (g.l1_entries_for(size), g.clusters_of(size)),
    };
    check_preallocation(data_file.unwrap_or(file), how)?;
    let data = if g.data_file { 0 } else { preallocated };
    let plan = Plan::new(options, size, l2_tables, data)?;
    let layout = &plan.layout;
    empty(file)?;
    file.set_len(layout.total() << g.cluster_bits)
        .map_err(Error::io("cannot extend the file"))?;
    let tables = (0..l2_tables).map(|index| preallocated_table(&plan, index));
    plan.put_tables(0..l2_tables, tables, &mut |at, cluster, used| {
        write_padded(file, cluster, used, at)
    })?;
    let at = HostOffset::of_cluster(layout.encryption(), g.cluster_bits);
    file.write_at(&encryption, at.0).map_err(failed())?;
    match data_file {
        Some(data) => {
            data.set_len(0).map_err(failed())?;
            data.set_len(size).map_err(failed())?;
            preallocate(data, how, 0, size)?;
            data.sync().map_err(Error::io("cannot flush"))?;
        }
        None => {
            let at = layout.first_data() << g.cluster_bits;
            preallocate(file, how, at, layout.data << g.cluster_bits)?;
        }
    }
    file.sync().map_err(Error::io("cannot flush"))?;
    file.write_at(&plan.first, 0).map_err(failed())?;
    file.sync().map_err(Error::io("cannot flush"))
}

/// Returns the L2 table with this index of a disk whose clusters are all allocated.
fn preallocated_table(plan: &Plan, index: u64) -> Vec<u8> {
    let g = plan.geometry();
    let mut table = vec![0; g.cluster_size() as usize];
    let first = index << g.l2_bits();
    let clusters = g.clusters_of(plan.header.size) - first;
    for index in 0..clusters.min(g.l2_entries()) {
        let host = match g.data_file {
            true => GuestOffset::of_cluster(first + index, g.cluster_bits).in_data_file(),
            false => plan.data(first + index),
        };
        let mut entry = L2Entry::data(&g, host, true);
        // With subclusters, a preallocated cluster does not hide the backing file. The contents of
        // a raw data file always count.
        if !plan.header.data_file_is_raw() {
            entry.bitmap = 0;
        }
        entry.encode(&mut table, (index * g.l2_entry_size()) as usize, &g);
    }
    table
}

/// Returns the extent of the image when the whole disk has been written. The clusters of an
/// external data file count, as in QEMU.
pub(super) fn fully_allocated(options: &Options, size: u64) -> Result<Extent> {
    options.validate()?;
    let g = Geometry {
        data_file: false,
        ..header_of(options, size).geometry()
    };
    let l1_entries = g.l1_entries_for(size);
    if l1_entries * L1Entry::SIZE > MAX_L1_BYTES {
        return Err(Error::usage(
            "the size exceeds the limit; use a larger cluster_size",
        ));
    }
    let encryption = encryption_len(options);
    let (tables, data) = (l1_entries, g.clusters_of(size));
    Ok(match preallocation_of(options) {
        Preallocation::Off => {
            let empty = Layout::new(&g, l1_entries, encryption, 0, 0);
            empty.extent().grown(&g, tables + data)
        }
        _ => Layout::new(&g, l1_entries, encryption, tables, data).extent(),
    })
}

fn encryption_len(options: &Options) -> u64 {
    match options.encryption.is_wanted {
        true => options.encryption.header_len(),
        false => 0,
    }
}

fn failed() -> impl FnOnce(std::io::Error) -> Error {
    Error::io("cannot write the image")
}

/// Whether the disk of a new image reads as zeroes, because of the image's entries or of zeroes
/// that were written. The file's former contents have no effect on that.
pub(super) fn has_no_contents(options: &Options) -> bool {
    let has_subclusters = options.qcow2.extended_l2 && !options.qcow2.data_file_raw;
    match preallocation_of(options) {
        Preallocation::Off | Preallocation::Full => true,
        // The clusters are allocated, but their subclusters are not.
        Preallocation::Metadata | Preallocation::Falloc => has_subclusters,
    }
}

/// Returns the preallocation to use. With a raw data file, all clusters are mapped at the guest's
/// offsets from the start.
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

/// Encodes the header, without the optional feature name table if it does not fit.
fn encode(header: &mut Header) -> Result<Vec<u8>> {
    if header.encode().is_err() {
        let kept = |e: &Extension| !matches!(e, Extension::FeatureNames(_));
        header.extensions.retain(kept);
    }
    header.encode()
}

/// Passes a table of 64-bit numbers to `put`. `words` are the nonzero entries in order, each with
/// its index.
fn put_words(
    g: &Geometry,
    first: u64,
    clusters: u64,
    words: impl Iterator<Item = (u64, u64)>,
    plan: &Plan,
    put: &mut Put<'_>,
) -> Result<()> {
    let mut words = words.peekable();
    let mut cluster = vec![0; g.cluster_size() as usize];
    let of_one = g.cluster_size() / 8;
    for i in 0..clusters {
        cluster.fill(0);
        let mut used = 0;
        while let Some((index, word)) = words.next_if(|(index, _)| index / of_one == i) {
            let at = (index % of_one * 8) as usize;
            cluster[at..at + 8].copy_from_slice(&word.to_be_bytes());
            used = at + 8;
        }
        put(plan.offset_of(first + i), &cluster, used)?;
    }
    Ok(())
}

/// Writes a cluster that is zeroes from `used` on. A hole reads as zeroes without being written,
/// which saves most of a large cluster. On a device, the zeroes must be written.
fn write_padded(file: &dyn ImageFile, cluster: &[u8], used: usize, at: HostOffset) -> Result<()> {
    let used = used.next_multiple_of(4096).min(cluster.len());
    let rest = cluster.len() - used;
    let written = match file.is_hole((at + used as u64).0, rest as u64) {
        true => used,
        false => cluster.len(),
    };
    file.write_at(&cluster[..written], at.0).map_err(failed())
}
