//! Changing a qcow2 image that nobody uses: the old image stays as it is until one write of one
//! sector makes the new one.
//!
//! An [`Editor`] never writes to a cluster that is in use. What changes is written to clusters
//! that are free in the image as it is on disk: tables by whoever edits, and then, in
//! [`Editor::commit`], the refcount blocks that changed and a refcount table that leads to them.
//! After a flush, the header's first sector switches to all of it at once, since L1 table, refcount
//! table, snapshot table, size and (see [`header`]) the extensions are in it. A power cut or a
//! kill at any instant leaves the old image or the new one, both without leaks; only the file may
//! be longer than it needs to be.
//!
//! Nothing is written to an image that a check finds corruptions in, so that what is free is
//! known: forged tables cannot lead a write anywhere.

mod clusters;
mod header;
mod mapping;
mod refcounts;

pub(crate) use header::{Switch, switch};
pub(crate) use mapping::Mapping;

use crate::offline::check::{self, Repair};
use crate::offline::read::qcow2_first_cluster;
use crate::qcow2::{Geometry, Header, L1Entry};
use crate::{Error, Format, HostOffset, Result};
use fathom_files::ImageFile;
use refcounts::Refcounts;

/// A qcow2 image that is being changed. Dropped without a commit, it has changed nothing.
pub struct Editor<'a> {
    file: &'a dyn ImageFile,
    /// The first cluster as it is on disk.
    first: Vec<u8>,
    /// As it is on disk.
    old: Header,
    /// As it will be.
    header: Header,
    refcounts: Refcounts<'a>,
    /// Length that the file gets back if nothing is committed. `None` while the header on disk may
    /// point behind it.
    old_len: Option<u64>,
}

impl<'a> Editor<'a> {
    /// Opens an image for changes. One that was not closed is repaired first, as QEMU does it;
    /// one that is marked corrupt, or has corruptions, or is encrypted, is refused.
    pub fn open(file: &'a dyn ImageFile) -> Result<Editor<'a>> {
        let header = read_header(file)?;
        header.encryption()?;
        if header.is_corrupt() {
            return Err(Error::invalid(
                "marked corrupt; repair the image with 'fathom img check --repair all'",
            ));
        }
        let repair = match header.is_dirty() {
            true => Repair::All,
            false => Repair::Nothing,
        };
        let options = check::Options {
            repair,
            ..check::Options::default()
        };
        let report = check::check(file, Format::Qcow2, &options, &mut |_| {})?;
        if report.corruptions + report.check_errors > 0 {
            return Err(Error::invalid(format!(
                "its metadata has {} errors; repair the image with 'fathom img check --repair \
                 all'",
                report.corruptions + report.check_errors
            )));
        }
        Editor::start(file)
    }

    /// Of an image that is known to be sound.
    fn start(file: &'a dyn ImageFile) -> Result<Editor<'a>> {
        let first = qcow2_first_cluster(file)?;
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

    /// The header as it will be.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The header, for changes: the disk's size, the places of the tables that an editor has
    /// written, the extensions. The refcount table's fields are the commit's own.
    pub fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    /// Sizes that follow from the header.
    pub fn geometry(&self) -> Geometry {
        self.header.geometry()
    }

    /// The file.
    pub fn file(&self) -> &'a dyn ImageFile {
        self.file
    }

    /// `len` bytes from `offset` on; zeroes beyond the end of the file. Callers bound `len`.
    pub fn read(&self, offset: HostOffset, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        self.file
            .read_at(&mut bytes, offset.0)
            .map_err(Error::io("cannot read its metadata"))?;
        Ok(bytes)
    }

    /// Takes that many free clusters in a row, with refcount one. They have anything in them.
    pub fn allocate(&mut self, clusters: u64) -> Result<HostOffset> {
        self.refcounts.allocate(clusters)
    }

    /// Likewise, behind all that is in use.
    pub fn allocate_at_end(&mut self, clusters: u64) -> Result<HostOffset> {
        self.refcounts.allocate_at_end(clusters)
    }

    /// Gives all refcounts another width, of 2^`order` bits. Fails when one does not fit.
    pub fn set_refcount_order(&mut self, order: u32) -> Result<()> {
        self.refcounts.set_order(order)?;
        self.header.refcount_order = order;
        Ok(())
    }

    /// How often the cluster that `offset` is in is referred to, after what was changed.
    pub fn refcount(&mut self, offset: HostOffset) -> Result<u64> {
        self.refcounts.get(offset.cluster(self.header.cluster_bits))
    }

    /// Counts another reference to each cluster that these bytes are in. Fails when that is
    /// more than the image's refcounts can say.
    pub fn reference(&mut self, offset: HostOffset, len: u64) -> Result<()> {
        self.refcounts.reference(offset, len)
    }

    /// Counts one reference less. Clusters without any are free after the commit, not before:
    /// the old image has them.
    pub fn release(&mut self, offset: HostOffset, len: u64) -> Result<()> {
        self.refcounts.release(offset, len)
    }

    /// Writes to clusters that were allocated since the last commit, and to no others.
    pub fn write(&self, offset: HostOffset, bytes: &[u8]) -> Result<()> {
        debug_assert!(
            self.refcounts.are_new(offset, bytes.len() as u64),
            "{offset:#x} is in use"
        );
        self.file
            .write_at(bytes, offset.0)
            .map_err(Error::io("cannot write the image"))
    }

    /// Makes the new image out of the old one, durably. Space that is free then goes back to the
    /// file system. After an error, the image is the old one, unless the file itself fails: then it
    /// may be the new one.
    pub fn commit(&mut self) -> Result<()> {
        self.refcounts.place(&mut self.header)?;
        let switch = header::switch(&self.first, &self.old, &self.header)?;
        // What a reader would refuse is not written.
        Header::parse(&switch.applied_to(&self.first))?;
        self.refcounts.write()?;
        switch.prepare(self.file)?;
        // From here on the header may be the new one, whose tables are behind the old end.
        self.old_len = None;
        switch.apply(self.file)?;
        let sector = switch.sector;
        self.first[..sector.len()].copy_from_slice(&sector);
        self.old = self.header.clone();
        self.give_back()
    }

    /// Space only: an image is as good without it.
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
    /// Cuts off what was written behind the old end without a commit.
    fn drop(&mut self) {
        if let Some(old_len) = self.old_len
            && self.file.len().is_ok_and(|len| len > old_len)
        {
            let _ = self.file.set_len(old_len);
        }
    }
}

/// A change of an image's header by itself, not written yet: of no other tables, and of nothing that they depend on.
pub(crate) fn header_switch(
    file: &dyn ImageFile,
    change: impl FnOnce(&mut Header),
) -> Result<Switch> {
    let first = qcow2_first_cluster(file)?;
    let old = Header::parse(&first)?;
    let mut new = old.clone();
    change(&mut new);
    let switch = header::switch(&first, &old, &new)?;
    Header::parse(&switch.applied_to(&first))?;
    Ok(switch)
}

/// Bytes that the tables of a change take at most, beside those that there are: a full file system
/// may lack as much. `l1_entries` are those that the disk is to have, `file_len` what the file has.
pub fn room_for_tables(header: &Header, l1_entries: u64, file_len: u64) -> u64 {
    let g = header.geometry();
    let l1 = g.clusters_of(l1_entries * L1Entry::SIZE);
    let blocks = g.clusters_of(file_len) >> g.refcount_block_bits();
    let refcounts = blocks + u64::from(header.refcount_table_clusters);
    let snapshots = g.clusters_of(u64::from(header.snapshots) * 128);
    // The disk's and a snapshot's L1 table; a few that are begun.
    (l1_entries + 2 * l1 + refcounts + snapshots + 4) << g.cluster_bits
}

fn read_header(file: &dyn ImageFile) -> Result<Header> {
    Header::parse(&qcow2_first_cluster(file)?)
}
