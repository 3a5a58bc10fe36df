//! Grows qcow2 disks.

use super::{Cluster, Compressed, EntryError, Geometry, L2Entry, decompress};
use crate::offline::create::{Preallocation, preallocate};
use crate::offline::edit::{Editor, Mapping};
use crate::offline::resize::{Resize, sync};
use crate::{Error, GuestOffset, HostOffset, Result};
use fathom_files::ImageFile;

pub(super) struct Growth<'a, 'e> {
    pub(super) editor: &'a mut Editor<'e>,
    pub(super) to: &'a Resize<'a>,
    /// Size of the disk in bytes before the change.
    pub(super) old: u64,
}

/// The contents of a cluster of the disk, and the state of its subclusters. Without subclusters,
/// all bits of a mask are equal.
struct Contents {
    bytes: Vec<u8>,
    allocated: u32,
    zero: u32,
}

impl Growth<'_, '_> {
    /// Makes all changes except the commit.
    pub(super) fn grow(mut self) -> Result<()> {
        let g = self.editor.geometry();
        let mut mapping = Mapping::active(self.editor)?;
        // Removes mappings beyond the end of the disk, such as saved VM state.
        mapping.cut(self.editor, g.clusters_of(self.old))?;
        mapping.grow(g.l1_entries_for(self.to.size));
        let new = self.resize_data_file()?;
        if !self.is_raw() {
            self.clear_tail(&mut mapping)?;
        }
        self.hide_below(&mut mapping)?;
        self.preallocate(&mut mapping, new)?;
        mapping.store_active(self.editor)?;
        self.editor.header_mut().size = self.to.size;
        Ok(())
    }

    /// Size of the backing file's disk in bytes, as far as the new size would expose it.
    fn below(&self) -> u64 {
        let size = self.to.below.map_or(0, |below| below.size());
        size.min(self.to.size)
    }

    /// Resizes the external data file. Bytes that a raw data file has beyond the end of the disk
    /// become part of the disk. In any other data file, such bytes are removed. Returns the offset
    /// from which the data file is new.
    fn resize_data_file(&self) -> Result<u64> {
        let Some(data) = self.to.data_file.filter(|_| self.to.size > self.old) else {
            return Ok(self.old);
        };
        let failed = || Error::io("cannot resize its data file");
        let len = match self.is_raw() {
            true => data.len().map_err(failed())?.max(self.old),
            false => self.old,
        };
        if len >= self.to.size {
            return Ok(self.to.size);
        }
        let resized = data.set_len(len);
        let resized = resized.and_then(|()| data.set_len(self.to.size));
        resized.map_err(failed())?;
        sync(data)?;
        Ok(len)
    }

    /// Makes the part of the disk's last cluster after the old end read as zeroes.
    fn clear_tail(&mut self, mapping: &mut Mapping) -> Result<()> {
        let g = self.editor.geometry();
        let within = GuestOffset(self.old).within(g.cluster_size()) as usize;
        if within == 0 || self.to.size == self.old {
            return Ok(());
        }
        let cluster = GuestOffset(self.old).cluster(g.cluster_bits);
        let entry = mapping.get(self.editor, cluster)?;
        let Some(mut contents) = self.contents(entry)? else {
            return Ok(());
        };
        self.end_in_zeroes(&mut contents, within)?;
        let place = match self.to.data_file {
            Some(data) => {
                let at = GuestOffset::of_cluster(cluster, g.cluster_bits).in_data_file();
                data.write_at(&contents.bytes, at.0)
                    .map_err(Error::io("cannot write its data file"))?;
                sync(data)?;
                at
            }
            None => {
                let at = self.editor.allocate(1)?;
                self.editor.write(at, &contents.bytes)?;
                at
            }
        };
        let mut entry = L2Entry::data(&g, place, true);
        if g.extended_l2 {
            entry.bitmap = u64::from(contents.zero) << 32 | u64::from(contents.allocated);
        }
        mapping.set(self.editor, cluster, entry)
    }

    /// Returns the contents of the disk's last cluster, or `None` if its tail already reads as
    /// zeroes.
    fn contents(&self, entry: L2Entry) -> Result<Option<Contents>> {
        let g = self.editor.geometry();
        let within = GuestOffset(self.old).within(g.cluster_size()) as usize;
        let exposed = self.below() > self.old;
        let (host, allocated, zero) = match entry.decode(&g).map_err(invalid)? {
            Cluster::Zero { .. } => return Ok(None),
            Cluster::Unallocated => (None, 0, 0),
            Cluster::Data { host } => (Some(host), u32::MAX, 0),
            Cluster::Subclusters {
                host,
                allocated,
                zero,
            } => (host, allocated, zero),
            Cluster::Compressed(stream) => {
                let bytes = self.decompressed(stream)?;
                let (allocated, zero) = (u32::MAX, 0);
                return Ok(bytes[within..].iter().any(|b| *b != 0).then_some(Contents {
                    bytes,
                    allocated,
                    zero,
                }));
            }
        };
        if host.is_none() && !exposed {
            return Ok(None);
        }
        let mut bytes = vec![0; g.cluster_size() as usize];
        if let Some(host) = host {
            let file = self.to.data_file.unwrap_or(self.editor.file());
            file.read_at(&mut bytes, host.0)
                .map_err(Error::io("cannot read its data"))?;
        }
        let hidden = bytes[within..].iter().all(|b| *b == 0);
        let whole = allocated == u32::MAX;
        Ok((!hidden || exposed && !whole).then_some(Contents {
            bytes,
            allocated,
            zero,
        }))
    }

    fn decompressed(&self, stream: Compressed) -> Result<Vec<u8>> {
        let compressed = self.editor.read(stream.offset, stream.len)?;
        let mut bytes = vec![0; self.editor.geometry().cluster_size() as usize];
        let kind = self.editor.header().compression;
        decompress(kind, &compressed, &mut bytes)
            .map_err(|e| Error::invalid(format!("the disk's last cluster: {e}")))?;
        Ok(bytes)
    }

    /// Fills the cluster with zeroes from byte `within` on. If the subcluster at `within` is
    /// unallocated, its part before `within` is copied from the backing file.
    fn end_in_zeroes(&self, contents: &mut Contents, within: usize) -> Result<()> {
        let g = self.editor.geometry();
        let size = g.subcluster_size() as usize;
        let (last, start) = (within / size, within / size * size);
        contents.bytes[within..].fill(0);
        let bit = if g.extended_l2 { 1 << last } else { u32::MAX };
        if within > start && (contents.allocated | contents.zero) & bit == 0 {
            contents.bytes[start..within].fill(0);
            self.read_below(&mut contents.bytes[start..within], start)?;
            contents.allocated |= bit;
        }
        if g.extended_l2 {
            let after = (within.div_ceil(size)..32).fold(0, |mask, n| mask | 1 << n);
            contents.allocated &= !after;
            contents.zero |= after;
        }
        Ok(())
    }

    /// Reads from the backing file, starting at byte `start` of the disk's last cluster.
    fn read_below(&self, buf: &mut [u8], start: usize) -> Result<()> {
        let g = self.editor.geometry();
        let at = (self.old & !(g.cluster_size() - 1)) + start as u64;
        let Some(below) = self.to.below else {
            return Ok(());
        };
        let there = below.size().saturating_sub(at).min(buf.len() as u64);
        below.read_at(&mut buf[..there as usize], at)
    }

    /// Maps new zero clusters wherever the backing file has data.
    fn hide_below(&mut self, mapping: &mut Mapping) -> Result<()> {
        let g = self.editor.geometry();
        let clusters = g.clusters_of(self.old)..g.clusters_of(self.below());
        if g.version < 3 && !clusters.is_empty() {
            return Err(Error::unsupported(
                "its backing file is larger than its disk, which only images of version 3 can \
                 hide; convert it with compat=1.1",
            ));
        }
        for cluster in clusters {
            mapping.set(self.editor, cluster, L2Entry::zero(&g, None))?;
        }
        Ok(())
    }

    /// Allocates the clusters of the new part of the disk. The data file is new from byte `new` on.
    fn preallocate(&mut self, mapping: &mut Mapping, new: u64) -> Result<()> {
        let how = self.how();
        let g = self.editor.geometry();
        let first = g.clusters_of(self.old);
        let clusters = g.clusters_of(self.to.size).saturating_sub(first);
        if how == Preallocation::Off || clusters == 0 {
            return Ok(());
        }
        let place = match self.to.data_file {
            Some(data) => {
                let how = match how {
                    // A device still holds its former contents there. The contents of a raw data
                    // file are the disk's.
                    Preallocation::Metadata if !data.grows() && !self.is_raw() => {
                        Preallocation::Full
                    }
                    how => how,
                };
                preallocate(data, how, new, self.to.size - new)?;
                sync(data)?;
                GuestOffset::of_cluster(first, g.cluster_bits).in_data_file()
            }
            None => self.reserve(how, clusters)?,
        };
        for n in 0..clusters {
            let entry = reserved(&g, place + (n << g.cluster_bits), self.is_raw());
            mapping.set(self.editor, first + n, entry)?;
        }
        Ok(())
    }

    fn is_raw(&self) -> bool {
        self.editor.header().data_file_is_raw()
    }

    /// Returns the preallocation to use. In an image with a raw data file, all clusters must be
    /// mapped at the guest's offsets.
    fn how(&self) -> Preallocation {
        match self.to.preallocation {
            Preallocation::Off if self.is_raw() => Preallocation::Metadata,
            how => how,
        }
    }

    /// Allocates clusters that read as zeroes, after all clusters in use.
    fn reserve(&mut self, how: Preallocation, clusters: u64) -> Result<HostOffset> {
        let (file, bits) = (self.editor.file(), self.editor.geometry().cluster_bits);
        let place = self.editor.allocate_at_end(clusters)?;
        let (start, end) = (place.0, place.0 + (clusters << bits));
        let len = file.len().map_err(Error::io("cannot read its size"))?;
        // An existing part holds old bytes, or the file is a device.
        write_zeroes(file, start, len.min(end).saturating_sub(start))?;
        if len < end {
            file.set_len(end)
                .map_err(Error::io("cannot extend the file"))?;
        }
        preallocate(file, how, start, end - start)?;
        Ok(place)
    }
}

/// Returns the entry of a preallocated cluster, whose contents are zeroes. With subclusters, the
/// entry marks them as zero, so that reads need not access the file. With a raw data file, the
/// entry maps the data, because other programs may read that file as the disk.
fn reserved(g: &Geometry, place: HostOffset, is_raw: bool) -> L2Entry {
    match g.extended_l2 && !is_raw {
        true => L2Entry::zero(g, Some((place, true))),
        false => L2Entry::data(g, place, true),
    }
}

fn invalid(error: EntryError) -> Error {
    Error::invalid(format!("the disk's last cluster: {error}"))
}

/// Writes zeroes in chunks.
pub(super) fn write_zeroes(file: &dyn ImageFile, at: u64, len: u64) -> Result<()> {
    preallocate(file, Preallocation::Full, at, len)
}
