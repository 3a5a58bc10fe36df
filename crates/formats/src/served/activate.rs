//! Activates an image: creates everything that is in memory while it is in use.
//!
//! Headers are read again, since another process may have changed the image after it was opened:
//! for example the source of a live migration.

use super::active::{Active, Layer};
use super::alloc::{Allocator, Append, Refcounts, Space};
use super::encrypted::fingerprint;
use super::epoch::Epochs;
use super::follow::has_same_below;
use super::helpers::Helpers;
use super::io::StorageId;
use super::layout::Layout;
use super::metadata::Metadata;
use super::missing::Missing;
use super::open::{Chain, Link, check};
use super::options::{ImageOptions, OwnBitmaps};
use super::problem::{told, unusable};
use super::storage::Storage;
use super::tables::{Parts, Tables};
use crate::Image;
use crate::offline::bitmap::mark_unrecorded;
use crate::offline::check::{self as checking, Repair};
use crate::offline::info::read_snapshots;
use crate::qcow2::refcount::TableEntry;
use crate::qcow2::{self, CompressionType, L1Entry, MAX_L1_BYTES, Region, Regions};
use crate::{Error, Format, HostOffset, Result, qed};
use fathom_core::DiskError;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Minimum number of slices of one image in memory.
const MIN_SLICES: u64 = 16;

/// The inputs of one activation.
struct Fresh<'a> {
    chain: &'a Chain,
    options: &'a ImageOptions,
    /// Size of the disk in bytes.
    size: u64,
    /// The header of the image in that storage after a rebase by this server.
    rebased: Option<&'a (StorageId, Image)>,
    epochs: Arc<Epochs>,
    /// Bytes of L2 tables in memory per image.
    cache: u64,
}

pub(super) fn activate(
    chain: &Chain,
    options: &ImageOptions,
    size: u64,
    rebased: Option<&(StorageId, Image)>,
    helpers: &Arc<Helpers>,
) -> std::result::Result<Active, DiskError> {
    let links = chain.links();
    let with_tables = links.iter().filter(|link| link.image.has_tables());
    let fresh = Fresh {
        chain,
        options,
        size,
        rebased,
        epochs: Arc::default(),
        cache: options.metadata_cache / with_tables.count().max(1) as u64,
    };
    let layers: std::result::Result<Vec<_>, _> =
        links.iter().map(|link| fresh.layer(link)).collect();
    let is_used = |id| { links.iter() }.any(|link| (link.storage..=link.data).contains(&id));
    let lengths = (0..).zip(&chain.storages).map(|(id, storage)| {
        if !is_used(id) {
            return Ok(0);
        }
        let len = storage
            .bytes()
            .len()
            .map_err(Error::io("cannot read its size"));
        len.map_err(told(storage.path()))
    });
    let lengths: std::result::Result<Vec<_>, _> = lengths.collect();
    Ok(Active {
        layers: layers?,
        lengths: lengths?,
        complained: AtomicBool::new(false),
        storages: chain.storages.clone(),
        epochs: fresh.epochs,
        helpers: helpers.clone(),
        rebasing: options.rebasing,
    })
}

impl Fresh<'_> {
    fn layer(&self, link: &Link) -> std::result::Result<Layer, DiskError> {
        let file = &self.chain.storages[usize::from(link.storage)];
        let path = file.path();
        if !link.image.has_tables() {
            let (offset, size) = link.raw;
            if link.storage == 0 {
                whole(link, &**file).map_err(told(path))?;
            }
            return Ok(Layer::Raw {
                is_plain: matches!(link.image, Image::Raw(_)),
                storage: link.storage,
                offset,
                size,
            });
        }
        let tables = self.tables(link, file);
        let tables = tables.map_err(told(path))?;
        tables
            .map(|t| Layer::Tables(Arc::new(t)))
            .map_err(|problem| {
                self.chain.condition.note_damage(link.storage);
                unusable(
                    path,
                    format!("{problem}; repair the image with 'fathom img check --repair all'"),
                )
            })
    }

    /// Returns the size of the image. The top image may have been resized since it was opened.
    fn size_of(&self, link: &Link) -> u64 {
        match link.storage {
            0 => self.size,
            _ => link.image.size(),
        }
    }

    /// Returns the handling of the image's own bitmaps.
    ///
    /// Changes are recorded neither for backing images, nor for a top image that could have no
    /// bitmaps when it was opened.
    fn bitmaps_of(&self, link: &Link) -> OwnBitmaps {
        let can_have = |link: &Link| link.storage == 0 && self.chain.can_have_bitmaps;
        match self.options.own_bitmaps {
            OwnBitmaps::Recorded if !can_have(link) => OwnBitmaps::Missed,
            bitmaps => bitmaps,
        }
    }

    /// Reads an image's tables. The inner error describes damage that a repair may fix.
    fn tables(
        &self,
        link: &Link,
        file: &Arc<dyn Storage>,
    ) -> Result<std::result::Result<Tables, String>> {
        let format = link.image.format();
        let mut image = Image::read(file.bytes(), format)?;
        if link.writable && image.needs_check() {
            let repaired = repair(&**file, format);
            repaired.inspect_err(|_| self.chain.condition.note_damage(link.storage))?;
            image = Image::read(file.bytes(), format)?;
        }
        if let (Some(name), true) = (&self.options.snapshot, link.storage == 0) {
            image = image.at_snapshot(file.bytes(), name)?;
        }
        let rebased = self
            .rebased
            .filter(|(of, to)| *of == link.storage && has_same_below(to, &image));
        let before = rebased.map_or(&link.image, |(_, image)| image);
        if !self.chain.has_same_data(link, &image) {
            return Err(other_disk());
        }
        same(before, self.size_of(link), &image)?;
        if image.is_corrupt() {
            self.chain.condition.note_damage(link.storage);
        }
        check(file.path(), &image, link.writable)
            .map_err(|error| Error::Unsupported(error.to_string()))?;
        match &mut image {
            Image::Qcow2(header) => {
                let crypto = header.encryption()?;
                let crypto_fingerprint = crypto
                    .map(|crypto| fingerprint(&**file, crypto))
                    .transpose()?;
                if crypto_fingerprint != link.crypto_fingerprint {
                    return Err(Error::invalid(
                        "its encryption has changed since the image was opened; restart the \
                         server",
                    ));
                }
                if link.writable {
                    let bitmaps = self.bitmaps_of(link);
                    prepare_qcow2(&**file, header, bitmaps)?;
                }
                self.qcow2(link, file, header)
            }
            Image::Qed(qed::QedImage { header, .. }) => {
                if link.writable && header.prepare_for_writing() {
                    write(&**file, 0, &header.encode())?;
                }
                self.qed(link, file, header)
            }
            Image::Raw(_) | Image::Luks(_) | Image::Foreign(_) => {
                unreachable!("they have no tables")
            }
        }
    }

    fn parts(&self, link: &Link, file: &Arc<dyn Storage>, layout: Layout) -> Result<Parts> {
        let slices = (self.cache / layout.slice_bytes()).max(MIN_SLICES);
        Ok(Parts {
            layout,
            file: file.clone(),
            storage: link.storage,
            data: link.data,
            has_data_file: link.image.has_data_file(),
            is_encrypted: link.image.is_encrypted(),
            compression: CompressionType::Deflate,
            snapshots: 0,
            size: self.size_of(link),
            file_len: file
                .bytes()
                .len()
                .map_err(Error::io("cannot read its size"))?,
            l1_offset: HostOffset(0),
            l1: Vec::new(),
            most_l1: 0,
            alloc: Allocator {
                space: Space::ReadOnly,
                metadata: Metadata::none(),
            },
            max_slices: usize::try_from(slices).unwrap_or(usize::MAX),
            writable: link.writable,
            discard: self.options.discard,
            zero_missing: self.options.zero_missing_clusters,
            counts: self.chain.counts.clone(),
            condition: self.chain.condition.clone(),
        })
    }

    fn qcow2(
        &self,
        link: &Link,
        file: &Arc<dyn Storage>,
        header: &qcow2::Header,
    ) -> Result<std::result::Result<Tables, String>> {
        let g = header.geometry();
        let layout = Layout::Qcow2(g);
        let mut parts = self.parts(link, file, layout)?;
        parts.compression = header.compression;
        parts.snapshots = header.snapshots;
        parts.l1_offset = header.l1_offset;
        parts.l1 = words(&**file, header.l1_offset, header.l1_entries.into(), layout)?;
        if !link.writable {
            return Ok(Ok(Tables::new(parts)));
        }
        parts.most_l1 = (MAX_L1_BYTES / L1Entry::SIZE) as usize;
        let entries = header.refcount_table_bytes() / TableEntry::SIZE;
        let table = words(&**file, header.refcount_table_offset, entries, layout)?;
        if let Some(at) = table.iter().find(|at| **at >= parts.file_len) {
            let problem = format!("the refcount block at {at:#x} is beyond the file's end");
            return Ok(Err(format!("corrupt: {problem}")));
        }
        let regions = match regions(&**file, header, &table)? {
            Ok(regions) => regions,
            Err(problem) => return Ok(Err(problem)),
        };
        let fresh_from = match file.bytes().grows() {
            true => g.clusters_of(parts.file_len),
            false => u64::MAX,
        };
        let at = header.refcount_table_offset;
        let data = &self.chain.storages[usize::from(link.data)];
        let missing = match parts.zero_missing {
            true => None,
            false => Missing::find(&**file, &**data, &parts, &g, &table)?,
        };
        let space = Refcounts::new(g, table, at, fresh_from, self.epochs.clone());
        let metadata = self.metadata(regions, &parts);
        if let (Some(missing), Ok(_)) = (missing, &metadata) {
            return Err(missing.refused());
        }
        Ok(space.and_then(|space| {
            parts.alloc = Allocator {
                space: Space::Refcounts(Box::new(space)),
                metadata: metadata?,
            };
            Ok(Tables::new(parts))
        }))
    }

    fn qed(
        &self,
        link: &Link,
        file: &Arc<dyn Storage>,
        header: &qed::Header,
    ) -> Result<std::result::Result<Tables, String>> {
        let g = header.geometry();
        let layout = Layout::Qed(g);
        let mut parts = self.parts(link, file, layout)?;
        parts.l1_offset = header.l1_offset;
        parts.l1 = words(&**file, header.l1_offset, g.table_entries(), layout)?;
        if !link.writable {
            return Ok(Ok(Tables::new(parts)));
        }
        let mut regions = Regions::new(g.cluster_bits);
        let overlap = regions
            .add(Region::Header, HostOffset(0), header.header_bytes())
            .and_then(|()| regions.add(Region::ActiveL1, header.l1_offset, g.table_bytes()));
        if let Err(overlap) = overlap {
            return Ok(Err(format!("corrupt: {overlap}")));
        }
        let metadata = match self.metadata(regions, &parts) {
            Ok(metadata) => metadata,
            Err(problem) => return Ok(Err(problem)),
        };
        let whole = parts.file_len.next_multiple_of(g.cluster_size());
        let space = Append::new(g.cluster_bits, whole, file.bytes().grows());
        parts.alloc = Allocator {
            space: Space::Append(space),
            metadata,
        };
        Ok(Ok(Tables::new(parts)))
    }

    /// Collects the image's metadata regions, including the clusters of all L2 tables.
    fn metadata(&self, regions: Regions, parts: &Parts) -> std::result::Result<Metadata, String> {
        let layout = &parts.layout;
        let per_table = layout.table_bytes() >> layout.cluster_bits();
        let mut clusters = Vec::new();
        for entry in &parts.l1 {
            let table = layout.table(*entry, parts.file_len);
            if let Some(table) = table.map_err(|problem| format!("corrupt: {problem}"))? {
                let first = table.cluster(layout.cluster_bits());
                clusters.extend(first..first + per_table);
            }
        }
        Metadata::new(regions, clusters).map_err(|problem| format!("corrupt: {problem}"))
    }
}

/// Reads a table of 64-bit words in the layout's byte order.
fn words(file: &dyn Storage, at: HostOffset, count: u64, layout: Layout) -> Result<Vec<u64>> {
    // The header's checks have bounded the count.
    let mut bytes = vec![0; count as usize * 8];
    file.bytes()
        .read_at(&mut bytes, at.0)
        .map_err(Error::io("cannot read its tables"))?;
    let (words, _) = bytes.as_chunks::<8>();
    Ok(words.iter().map(|w| layout.word(*w)).collect())
}

/// Collects the regions of an image's metadata, except L2 tables.
fn regions(
    file: &dyn Storage,
    header: &qcow2::Header,
    refcount_table: &[u64],
) -> Result<std::result::Result<Regions, String>> {
    let snapshots = read_snapshots(file.bytes(), header)?;
    let mut table = Vec::new();
    snapshots.iter().for_each(|s| s.encode(&mut table));
    let (mut regions, overlaps) = Regions::of_header(header, table.len() as u64);
    let blocks = refcount_table.iter().filter(|block| **block != 0);
    let size = header.geometry().cluster_size();
    let blocks = blocks.map(|at| regions.add(Region::RefcountBlock, HostOffset(*at), size));
    let mut overlap = blocks.filter_map(|added| added.err()).next();
    for snapshot in &snapshots {
        let len = u64::from(snapshot.l1_entries) * L1Entry::SIZE;
        let added = regions.add(Region::InactiveL1, snapshot.l1_offset, len);
        overlap = overlap.or(added.err());
    }
    let overlap = overlaps.into_iter().next().or(overlap);
    Ok(match overlap {
        None => Ok(regions),
        Some(overlap) => Err(format!("corrupt: {overlap}")),
    })
}

fn repair(file: &dyn Storage, format: Format) -> Result<()> {
    let options = checking::Options {
        repair: Repair::All,
        ..Default::default()
    };
    let path = file.path().display();
    tracing::warn!("{path}: not closed cleanly; checking its metadata");
    let mut say = |line: &str| tracing::debug!("{path}: {line}");
    let report = checking::check(file.bytes(), format, &options, &mut say)?;
    if report.corruptions > 0 || report.check_errors > 0 {
        return Err(Error::invalid(
            "not closed cleanly, and the automatic repair failed; 'fathom img check' shows why",
        ));
    }
    Ok(())
}

/// Fails if a raw file has become shorter, since its missing data would read as zeroes.
fn whole(link: &Link, file: &dyn Storage) -> Result<()> {
    let len = file.bytes().len();
    let len = len.map_err(Error::io("cannot read its size"))?;
    let (offset, size) = link.raw;
    match matches!(link.image, Image::Foreign(_)) || offset.0 + size <= len.next_multiple_of(512) {
        true => Ok(()),
        false => Err(Error::invalid(
            "shorter than when the image was opened; restart the server",
        )),
    }
}

/// Fails unless the image still has its size, and its backing file is the one that is open here.
fn same(before: &Image, size: u64, now: &Image) -> Result<()> {
    match size == now.size() && has_same_below(before, now) {
        true => Ok(()),
        false => Err(other_disk()),
    }
}

fn other_disk() -> Error {
    Error::invalid(
        "its size, backing file or data file has changed since the image was opened; restart the \
         server",
    )
}

/// Writes the header changes that must be durable before the first write.
fn prepare_qcow2(
    file: &dyn Storage,
    header: &mut qcow2::Header,
    bitmaps: OwnBitmaps,
) -> Result<()> {
    let before = header.autoclear;
    header.prepare_for_writing();
    if bitmaps == OwnBitmaps::Missed {
        miss_writes(file, header, 0);
    }
    match header.autoclear == before {
        true => Ok(()),
        false => write(file, qcow2::AUTOCLEAR_AT, &header.autoclear.to_be_bytes()),
    }
}

/// Marks the image's enabled bitmaps as unusable, since they miss writes from now on.
///
/// `recorded` is the number of these bitmaps whose changes are recorded elsewhere. Returns false
/// if the bitmaps cannot be marked. The bitmaps flag in `header` is then clear, which makes all of
/// them invalid; the caller has to write the header.
pub(super) fn miss_writes(file: &dyn Storage, header: &mut qcow2::Header, recorded: usize) -> bool {
    let path = file.path().display();
    match mark_unrecorded(file.bytes(), header) {
        Ok(marked) if marked > recorded => tracing::warn!(
            "{path}: its {} enabled bitmaps miss writes from now on, and can only be removed \
             ('fathom img bitmap --remove')",
            marked - recorded
        ),
        Ok(_) => {}
        Err(problem) => {
            header.autoclear &= !qcow2::AUTOCLEAR_BITMAPS;
            tracing::warn!("{path}: its bitmaps are dropped: {problem}");
            return false;
        }
    }
    true
}

fn write(file: &dyn Storage, at: u64, bytes: &[u8]) -> Result<()> {
    let written = file
        .bytes()
        .write_at(bytes, at)
        .and_then(|()| file.bytes().sync());
    written.map_err(Error::io("cannot write its header"))
}
