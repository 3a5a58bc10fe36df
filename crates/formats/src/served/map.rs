//! Maps the guest's bytes to places in a chain, as `qemu-img map` does.
//!
//! For tools that copy, compare and measure. Reads tables with blocking I/O, and sees what a worker
//! has changed in memory. A change during the look-up may or may not be reported.

use super::active::{Active, Layer};
use super::disk::ImageDisk;
use super::io::StorageId;
use super::metadata_only::has_metadata_only;
use super::problem::unusable;
use super::slice::Slice;
use super::tables::Tables;
use crate::qcow2::Cluster;
use crate::{GuestOffset, HostOffset};
use fathom_core::DiskError;
use fathom_units::cause;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A uniform part of the guest's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapExtent {
    /// Offset in the guest's disk, in bytes.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Depth of the image that decides what the part reads as: 0 is the top image, 1 its backing
    /// image. An image without an entry decides if it is the last one, or if the next one ends
    /// before this part.
    pub depth: usize,
    /// Whether that image has an entry for the part, as data or as zeroes. If so, the part would
    /// read the same with another backing file.
    pub present: bool,
    /// Whether the part reads as zeroes.
    pub zero: bool,
    /// Whether the part is stored. With `zero` too, it is in a cluster where the file has a hole.
    pub data: bool,
    /// Whether the part is in a compressed cluster.
    pub compressed: bool,
    /// Place of its bytes, or where they would be written. `None` if compressed or without a place.
    pub host: Option<Host>,
}

/// A place in one of a chain's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Index of the file in [`Mapper::paths`].
    pub file: u8,
    /// Offset in bytes.
    pub offset: u64,
}

impl MapExtent {
    /// Returns whether no searched image decides what the part reads as, so that images below do.
    ///
    /// Never true when the whole chain was searched.
    pub fn is_below(&self) -> bool {
        !self.data && !self.zero
    }

    /// Appends the next extent, if it continues this one in the same file; returns whether it does.
    pub fn merge(&mut self, next: &MapExtent) -> bool {
        let goes_on = |host: Host| Host {
            offset: host.offset + self.len,
            ..host
        };
        let more = MapExtent {
            start: self.start + self.len,
            len: next.len,
            host: self.host.map(goes_on),
            ..*self
        };
        let is_same = more == *next;
        if is_same {
            self.len += next.len;
        }
        is_same
    }
}

/// Looks up where the bytes of an activated disk are.
///
/// Remembers what it has read last. A mapper is therefore for a single thread, and is fastest with
/// ascending offsets.
pub struct Mapper {
    active: Arc<Active>,
    near: Vec<Near>,
    paths: Vec<PathBuf>,
}

/// The state that a mapper remembers of one image of the chain.
#[derive(Default)]
struct Near {
    slice: Option<Arc<Slice>>,
    /// Whether allocated clusters may be holes of the file.
    metadata_only: Option<bool>,
    /// The last range of the file found to be a hole (true) or data (false).
    run: Option<(bool, Range<HostOffset>)>,
}

impl ImageDisk {
    /// Returns the mapper of the disk, which must be active.
    pub fn mapper(&self) -> Result<Mapper, DiskError> {
        self.mapper_from(0)
    }

    /// Returns the mapper of the chain that starts at that depth.
    pub fn mapper_from(&self, depth: usize) -> Result<Mapper, DiskError> {
        let active = self.active();
        let active = active.filter(|active| depth < active.layers.len());
        let active = active.ok_or_else(|| unusable(self.path(), "is not in use"))?;
        let active = match depth {
            0 => active,
            _ => Arc::new(active.from(depth)),
        };
        let near = active.layers.iter().map(|_| Near::default()).collect();
        let paths = self.paths();
        Ok(Mapper {
            active,
            near,
            paths,
        })
    }
}

impl Mapper {
    /// Returns the number of images in the chain, at least 1.
    pub fn depth(&self) -> usize {
        self.active.layers.len()
    }

    /// Returns the bytes of the disk that the image at this depth covers.
    pub fn size(&self, depth: usize) -> u64 {
        self.active.layers[depth].size()
    }

    /// Returns the paths of the chain's files, indexed by [`Host::file`].
    ///
    /// As QEMU shows them: the directory of the image that names a file, and the name in it.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Returns what the bytes from `guest` on are, as an extent of at most `max` bytes.
    ///
    /// Both are within the disk and `max` is not 0. Searches only the first `layers` images of the
    /// chain. If none of them decides, the extent [is below](MapExtent::is_below).
    ///
    /// # Errors
    /// An image is invalid or cannot be read.
    pub fn at(&mut self, guest: u64, mut max: u64, layers: usize) -> Result<MapExtent, DiskError> {
        let guest = GuestOffset(guest);
        let layers = layers.min(self.active.layers.len());
        let is_whole = layers == self.active.layers.len();
        for depth in 0..layers {
            let left = self.size(depth).saturating_sub(guest.0);
            if left == 0 {
                // Beyond the end of a short backing image: the image above has no entry there.
                return Ok(nothing(guest, max, depth.saturating_sub(1), true));
            }
            max = max.min(left);
            let found = self.in_layer(depth, guest, max)?;
            if found.present {
                return Ok(found);
            }
            max = found.len;
            let ends = depth + 1 < layers && self.size(depth + 1) <= guest.0;
            if ends || depth + 1 == layers && is_whole {
                let zero = true;
                return Ok(MapExtent { zero, ..found });
            }
        }
        Ok(nothing(guest, max, layers, false))
    }

    /// Returns all extents of a range within the disk, merged as far as possible.
    ///
    /// See [`Mapper::at`] for `layers`. Ends with the first error.
    pub fn extents(&mut self, range: Range<u64>, layers: usize) -> Extents<'_> {
        Extents {
            mapper: self,
            layers,
            at: range.start,
            end: range.end,
            next: None,
        }
    }

    fn in_layer(
        &mut self,
        depth: usize,
        guest: GuestOffset,
        max: u64,
    ) -> Result<MapExtent, DiskError> {
        let active = self.active.clone();
        match &active.layers[depth] {
            Layer::Raw {
                storage,
                offset,
                is_plain,
                ..
            } => {
                let host = *offset + guest.0;
                let (hole, len) = self.run(depth, *storage, host, max);
                Ok(MapExtent {
                    start: guest.0,
                    len,
                    depth,
                    present: true,
                    zero: hole,
                    data: !hole,
                    compressed: false,
                    host: is_plain.then_some(Host {
                        file: *storage,
                        offset: host.0,
                    }),
                })
            }
            Layer::Tables(tables) => {
                let found = self.in_tables(tables, depth, guest, max);
                let mut found = found.map_err(|problem| unusable(tables.file.path(), problem))?;
                if let (true, Some(host)) = (found.data, found.host)
                    && self.is_metadata_only(tables, depth)
                {
                    let at = HostOffset(host.offset);
                    (found.zero, found.len) = self.run(depth, host.file, at, found.len);
                }
                Ok(found)
            }
        }
    }

    /// Returns whether the file has a hole at `at`, and for how many of `max` bytes this holds.
    fn run(&mut self, depth: usize, file: StorageId, at: HostOffset, max: u64) -> (bool, u64) {
        let known = &mut self.near[depth].run;
        let (hole, run) = match known {
            Some((hole, run)) if run.contains(&at) => (*hole, run),
            _ => {
                let (hole, end) = self.active.storages[usize::from(file)].bytes().run_at(at.0);
                let (hole, run) = known.insert((hole, at..HostOffset(end)));
                (*hole, run)
            }
        };
        (hole, max.min(run.end - at))
    }

    fn is_metadata_only(&mut self, tables: &Tables, depth: usize) -> bool {
        // A wrong answer after an error only costs time.
        *self.near[depth]
            .metadata_only
            .get_or_insert_with(|| has_metadata_only(tables.file.bytes()).unwrap_or(false))
    }

    fn in_tables(
        &mut self,
        tables: &Tables,
        depth: usize,
        guest: GuestOffset,
        max: u64,
    ) -> Result<MapExtent, String> {
        let mut found = nothing(guest, 0, depth, false);
        let first = tables.slice_of(guest);
        let Some(slice) = self.slice(tables, depth, first)? else {
            let last = tables.slice_of(guest + (max - 1));
            let mut next = first + 1;
            // Skips whole tables that do not exist.
            while next <= last && tables.table_of(next)?.is_none() {
                let per_table = tables.layout.slices_per_table();
                next = (next / per_table + 1) * per_table;
            }
            let covered = tables.layout.slice_entries() << tables.layout.cluster_bits();
            found.len = max.min(next.saturating_mul(covered) - guest.0);
            return Ok(found);
        };
        while found.len < max {
            let at = guest + found.len;
            if found.len > 0 && tables.slice_of(at) != first {
                break;
            }
            let left = max - found.len;
            let more = in_cluster(tables, &slice, depth, at, left)?;
            if found.len == 0 {
                found = more;
            } else if !found.merge(&more) {
                break;
            }
        }
        Ok(found)
    }

    /// Returns the slice as it is in memory or on disk.
    ///
    /// Does not put the slice into the cache, which only tasks that change slices fill.
    fn slice(
        &mut self,
        tables: &Tables,
        depth: usize,
        number: u64,
    ) -> Result<Option<Arc<Slice>>, String> {
        if let Some(slice) = &self.near[depth].slice
            && slice.number == number
            && slice.live.load(Ordering::Acquire)
            && !tables.writable
        {
            return Ok(Some(slice.clone()));
        }
        let cached = tables.state().cache.get(number);
        let slice = match (cached, tables.table_of(number)?) {
            (Some(slice), _) => slice,
            (None, None) => return Ok(None),
            (None, Some(table)) => {
                let mut bytes = vec![0; tables.layout.slice_bytes() as usize];
                let at = tables.place_of(number, table);
                let read = tables.file.bytes().read_at(&mut bytes, at.0);
                read.map_err(|error| format!("cannot read an L2 table: {}", cause(error)))?;
                Arc::new(Slice::parse(number, &bytes, &tables.layout))
            }
        };
        Ok(Some(self.near[depth].slice.insert(slice).clone()))
    }
}

/// Iterator over consecutive extents, merged.
pub struct Extents<'a> {
    mapper: &'a mut Mapper,
    layers: usize,
    at: u64,
    end: u64,
    next: Option<MapExtent>,
}

impl Iterator for Extents<'_> {
    type Item = Result<MapExtent, DiskError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut found = self.next.take();
        while self.at < self.end {
            let more = match self.mapper.at(self.at, self.end - self.at, self.layers) {
                Ok(more) => more,
                // The next call returns the error.
                Err(_) if found.is_some() => break,
                Err(error) => {
                    self.at = self.end;
                    return Some(Err(error));
                }
            };
            self.at += more.len;
            match found.as_mut().map(|found| found.merge(&more)) {
                None => found = Some(more),
                Some(true) => {}
                Some(false) => {
                    self.next = Some(more);
                    break;
                }
            }
        }
        found.map(Ok)
    }
}

/// Returns an extent that is in no image.
fn nothing(start: GuestOffset, len: u64, depth: usize, zero: bool) -> MapExtent {
    MapExtent {
        start: start.0,
        len,
        depth,
        present: false,
        zero,
        data: false,
        compressed: false,
        host: None,
    }
}

/// Returns the extent of one cluster from `guest` on, `max` bytes at most.
fn in_cluster(
    tables: &Tables,
    slice: &Slice,
    depth: usize,
    guest: GuestOffset,
    max: u64,
) -> Result<MapExtent, String> {
    let size = tables.layout.cluster_size();
    let inner = guest.within(size);
    let file_len = tables.file_len.load(Ordering::Relaxed);
    let entry = slice.entry(tables.index_of(guest));
    let mut found = nothing(guest, max.min(size - inner), depth, false);
    let host = match tables.layout.decode(entry, guest, file_len)? {
        Cluster::Unallocated => None,
        Cluster::Data { host } => {
            found.data = true;
            Some(host)
        }
        Cluster::Zero { host } => {
            found.zero = true;
            host
        }
        Cluster::Compressed(_) => {
            (found.data, found.compressed) = (true, true);
            None
        }
        Cluster::Subclusters {
            host,
            allocated,
            zero,
        } => {
            let unit = tables.layout.unit();
            let first = (inner / unit) as u32;
            let bit = |mask: u32| mask >> first & 1 == 1;
            (found.data, found.zero) = (bit(allocated), bit(zero));
            let alike = match (found.data, found.zero) {
                (true, _) => allocated,
                (_, true) => zero,
                _ => !(allocated | zero),
            };
            let units = (alike >> first).trailing_ones();
            found.len = max.min(u64::from(first + units) * unit - inner);
            host
        }
    };
    found.present = found.data || found.zero;
    // The place of encrypted data is of no use to a reader, who would see ciphertext.
    let host = host.filter(|_| !tables.is_encrypted);
    found.host = host.map(|host| Host {
        file: tables.data,
        offset: (host + inner).0,
    });
    Ok(found)
}
