//! Atomic changes of a qcow2 image that is not in use. The old image stays intact until one write
//! of one sector activates the new image.
//!
//! An [`Editor`] never writes to a cluster that is in use. New data and tables are written to
//! clusters that are free in the image on disk. Then [`Editor::commit`] writes the changed refcount
//! blocks and a refcount table that points to them. After a flush, the commit replaces the header's
//! first sector, which activates all changes at once. The header's first sector holds the places of
//! the L1 table, refcount table and snapshot table, the size and (see [`header`]) the extensions. A
//! power cut or a kill at any instant leaves the old image or the new image, both without leaks.
//! Only the file may be longer than necessary.
//!
//! An editor refuses an image in which a check finds corruptions. The refcounts are therefore
//! reliable, and forged tables cannot direct a write to a cluster in use.

mod clusters;
mod header;
mod mapping;
mod refcounts;

pub(crate) use header::{Switch, switch};
pub(crate) use mapping::Mapping;

use crate::qcow2::{CHECKER, first_cluster};
use crate::qcow2::{Geometry, Header, L1Entry};
use crate::{Error, HostOffset, Result};
use fathom_files::ImageFile;
use refcounts::Refcounts;

/// A qcow2 image that is being changed. An editor dropped without a commit has not changed the
/// image.
pub struct Editor<'a> {
    file: &'a dyn ImageFile,
    /// The first cluster as it is on disk.
    first: Vec<u8>,
    /// The header as it is on disk.
    old: Header,
    /// The header as it will be after the commit.
    header: Header,
    refcounts: Refcounts<'a>,
    /// Length to which the file is truncated if nothing is committed. `None` while the header on
    /// disk may refer to clusters beyond that length.
    old_len: Option<u64>,
}

impl<'a> Editor<'a> {
    /// Opens an image for changes. An image that was not closed properly is repaired first, as QEMU
    /// does.
    ///
    /// # Errors
    ///
    /// Fails for an image that is marked corrupt, has corruptions, or has encryption that is not
    /// supported.
    pub fn open(file: &'a dyn ImageFile) -> Result<Editor<'a>> {
        let header = read_header(file)?;
        header.encryption()?;
        if header.is_corrupt() {
            return Err(Error::invalid(
                "marked corrupt; repair the image with 'fathom img check --repair all'",
            ));
        }
        CHECKER.ensure_sound(file, header.is_dirty())?;
        Editor::start(file)
    }

    /// Opens an image that is known to be sound.
    fn start(file: &'a dyn ImageFile) -> Result<Editor<'a>> {
        let first = first_cluster(file)?;
        let old = Header::parse(&first)?;
        let mut header = old.clone();
        header.prepare_for_writing();
        Ok(Editor {
            file,
            refcounts: Refcounts::read(file, &header)?,
            old_len: Some(file.len().map_err(Error::io("cannot read its size"))?),
            first,
            old,
            header,
        })
    }

    /// The header as it will be after the commit.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The header, for changes: the disk's size, the places of tables that were written, the
    /// extensions. The commit sets the refcount table's fields.
    pub fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    /// The sizes that follow from the header.
    pub fn geometry(&self) -> Geometry {
        self.header.geometry()
    }

    /// The image's file.
    pub fn file(&self) -> &'a dyn ImageFile {
        self.file
    }

    /// Reads `len` bytes from `offset` on. Bytes beyond the end of the file read as zeroes. The
    /// caller must bound `len`.
    pub fn read(&self, offset: HostOffset, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        self.file
            .read_at(&mut bytes, offset.0)
            .map_err(Error::io("cannot read its metadata"))?;
        Ok(bytes)
    }

    /// Allocates contiguous free clusters with refcount one. The contents of the clusters are
    /// undefined.
    pub fn allocate(&mut self, clusters: u64) -> Result<HostOffset> {
        self.refcounts.allocate(clusters)
    }

    /// Allocates contiguous clusters after all clusters in use.
    pub fn allocate_at_end(&mut self, clusters: u64) -> Result<HostOffset> {
        self.refcounts.allocate_at_end(clusters)
    }

    /// Changes the width of all refcounts to 2^`order` bits. Fails if a refcount does not fit.
    pub fn set_refcount_order(&mut self, order: u32) -> Result<()> {
        self.refcounts.set_order(order)?;
        self.header.refcount_order = order;
        Ok(())
    }

    /// Returns the refcount of the cluster that contains `offset`, including the pending changes.
    pub fn refcount(&mut self, offset: HostOffset) -> Result<u64> {
        self.refcounts.get(offset.cluster(self.header.cluster_bits))
    }

    /// Adds a reference to each cluster that these bytes touch. Fails if a refcount would exceed
    /// its width.
    pub fn reference(&mut self, offset: HostOffset, len: u64) -> Result<()> {
        self.refcounts.reference(offset, len)
    }

    /// Removes a reference from each cluster that these bytes touch. Clusters without references
    /// are free only after the commit, because the old image still uses them.
    pub fn release(&mut self, offset: HostOffset, len: u64) -> Result<()> {
        self.refcounts.release(offset, len)
    }

    /// Writes to clusters that were allocated since the last commit. Other clusters must not be
    /// written.
    pub fn write(&self, offset: HostOffset, bytes: &[u8]) -> Result<()> {
        debug_assert!(
            self.refcounts.are_new(offset, bytes.len() as u64),
            "{offset:#x} is in use"
        );
        self.file
            .write_at(bytes, offset.0)
            .map_err(Error::io("cannot write the image"))
    }

    /// Makes all changes durable at once, and then returns free space to the file system. After an
    /// error, the image is the old one. Only if the file itself fails can the image be the new one.
    pub fn commit(&mut self) -> Result<()> {
        self.refcounts.place(&mut self.header)?;
        let switch = header::switch(&self.first, &self.old, &self.header)?;
        // Does not write a header that a reader would refuse.
        Header::parse(&switch.applied_to(&self.first))?;
        self.refcounts.write()?;
        switch.prepare(self.file)?;
        // From here on, the header on disk may be the new one, whose tables can be beyond the old
        // end.
        self.old_len = None;
        switch.apply(self.file)?;
        let sector = switch.sector;
        self.first[..sector.len()].copy_from_slice(&sector);
        self.old = self.header.clone();
        self.give_back()
    }

    /// Returns free space to the file system: discards freed clusters and truncates the file. The
    /// image is valid without this, so failures to do so are ignored.
    fn give_back(&mut self) -> Result<()> {
        let bits = self.header.cluster_bits;
        let end = self.refcounts.end()? << bits;
        let len = self.file.len();
        let len = len.map_err(Error::io("cannot read its size"))?.min(end);
        for clusters in self.refcounts.settle() {
            let (start, end) = (clusters.start << bits, (clusters.end << bits).min(len));
            let _ = self.file.discard(start, end.saturating_sub(start));
        }
        let _ = self.file.set_len(len);
        self.old_len = Some(len);
        Ok(())
    }
}

impl Drop for Editor<'_> {
    /// Truncates what was written beyond the old end without a commit.
    fn drop(&mut self) {
        if let Some(old_len) = self.old_len
            && self.file.len().is_ok_and(|len| len > old_len)
        {
            let _ = self.file.set_len(old_len);
        }
    }
}

/// Prepares a change of the header alone, without writing it. The change must not affect other
/// tables or anything that they depend on.
pub(crate) fn header_switch(
    file: &dyn ImageFile,
    change: impl FnOnce(&mut Header),
) -> Result<Switch> {
    let first = first_cluster(file)?;
    let old = Header::parse(&first)?;
    let mut new = old.clone();
    change(&mut new);
    let switch = header::switch(&first, &old, &new)?;
    Header::parse(&switch.applied_to(&first))?;
    Ok(switch)
}

/// Returns the maximum space in bytes that the tables of a change take in addition to the existing
/// ones. A full file system may lack this space. `l1_entries` is the number of L1 entries that the
/// disk will have, `file_len` the file's length in bytes.
pub fn room_for_tables(header: &Header, l1_entries: u64, file_len: u64) -> u64 {
    let g = header.geometry();
    let l1 = g.clusters_of(l1_entries * L1Entry::SIZE);
    let blocks = g.clusters_of(file_len) >> g.refcount_block_bits();
    let refcounts = blocks + u64::from(header.refcount_table_clusters);
    let snapshots = g.clusters_of(u64::from(header.snapshots) * 128);
    // The L1 tables of the disk and of a snapshot; a few clusters for tables that are being
    // written.
    (l1_entries + 2 * l1 + refcounts + snapshots + 4) << g.cluster_bits
}

fn read_header(file: &dyn ImageFile) -> Result<Header> {
    Header::parse(&first_cluster(file)?)
}
