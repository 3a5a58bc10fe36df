//! Restores changes that a killed predecessor had in memory only.
//!
//! The predecessor's file is sound. The file has the entries of the last write-back, any part of
//! the one in progress, and all data. The journal's further changes are validated like any
//! untrusted input, applied in memory, and written back before the first request.

use super::alloc::Space;
use super::io::{BlockingIo, Errno, Io};
use super::journal::Record;
use super::layout::{EXCLUSIVE, Problem};
use super::slice::Slice;
use super::tables::{Pinned, Tables, Unlinked};
use crate::qcow2::{Cluster, L2Entry};
use crate::{GuestOffset, HostOffset};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Why the image cannot be used; a `Problem` is one of the journal or of the image.
#[derive(Debug)]
pub(super) enum Failure {
    Errno(Errno),
    Problem(Problem),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::Errno(errno)
    }
}

/// The changes that are going to be made.
#[derive(Default)]
struct Plan {
    /// Clusters in use, in the order in which the predecessor made refcount blocks for them.
    claims: BTreeSet<u64>,
    /// L1 indexes, and the clusters of their tables.
    tables: Vec<(usize, Range<u64>)>,
    /// Slice, index, new entry and host cluster of each changed L2 entry.
    entries: Vec<(Pinned, usize, L2Entry, Option<u64>)>,
    unlinked: Vec<Unlinked>,
}

impl Plan {
    /// Notes that a cluster is in use; fails if it has another reference.
    fn claim(&mut self, cluster: u64) -> Result<(), Failure> {
        match self.claims.insert(cluster) {
            true => Ok(()),
            false => Err(invented(format!("a second reference to cluster {cluster}"))),
        }
    }
}

impl Tables {
    /// Applies the records that differ from the file.
    pub(super) async fn restore_records(
        &self,
        io: &BlockingIo<'_>,
        records: &[Record],
    ) -> Result<(), Failure> {
        let (mut l1, mut l2) = (BTreeMap::new(), BTreeMap::new());
        for record in records {
            match *record {
                Record::L1 { index, entry } => l1.insert(index, entry).map(|_| ()),
                Record::L2 { cluster, entry } => l2.insert(cluster, entry).map(|_| ()),
            };
        }
        let mut plan = Plan::default();
        for (index, entry) in l1 {
            self.plan_table(io, &mut plan, index, entry).await?;
        }
        for (cluster, entry) in l2 {
            self.plan_entry(io, &mut plan, cluster, entry).await?;
        }
        // A cluster that was freed and taken again before the file recorded either has a refcount
        // that is too high: a leak. The copied flag would claim a refcount of exactly one.
        let mut counted = BTreeSet::new();
        for cluster in std::mem::take(&mut plan.claims) {
            if self.claim(io, cluster).await? != 1 {
                counted.insert(cluster);
            }
        }
        let mut state = self.state();
        for (index, clusters) in plan.tables {
            if counted.contains(&clusters.start) {
                self.l1.entry(index).fetch_and(!EXCLUSIVE, Ordering::AcqRel);
            }
            state.alloc.metadata.add_table(clusters);
        }
        state.unlinked.extend(plan.unlinked);
        for (slice, index, entry, host) in &plan.entries {
            let exclusive = host.is_none_or(|host| !counted.contains(&host));
            let entry = match exclusive {
                true => *entry,
                false => entry.with_copied(false),
            };
            self.set_entry(&mut state, slice, *index, entry);
        }
        self.set_dirty(&mut state);
        Ok(())
    }

    async fn plan_table(
        &self,
        io: &BlockingIo<'_>,
        plan: &mut Plan,
        index: u64,
        entry: u64,
    ) -> Result<(), Failure> {
        let unlikely = || invented(format!("L1 entry {index}"));
        let place = usize::try_from(index).ok().and_then(|i| self.l1.get(i));
        let place = place.ok_or_else(unlikely)?;
        let now = place.load(Ordering::Acquire);
        if now == entry {
            return Ok(());
        }
        let file_len = self.file_len.load(Ordering::Relaxed);
        let table = |entry| self.layout.table(entry, file_len).map_err(Failure::Problem);
        let (old, new) = (table(now)?, table(entry)?);
        let new = new.filter(|_| self.layout.table_is_exclusive(entry));
        let new = new.ok_or_else(unlikely)?;
        if old == Some(new) {
            // An earlier successor has only corrected the copied flag.
            return Ok(());
        }
        let (bits, len) = (self.layout.cluster_bits(), self.layout.table_bytes());
        let clusters = new.clusters(len, bits);
        for cluster in clusters.clone() {
            plan.claim(cluster)?;
        }
        self.check_new_table(io, index, new).await?;
        plan.tables.push((index as usize, clusters));
        plan.unlinked.extend(old.map(|offset| Unlinked {
            offset,
            len,
            is_table: true,
        }));
        place.store(entry, Ordering::Release);
        self.state().dirty_l1.insert(index as usize);
        Ok(())
    }

    /// Checks a table that the predecessor has made.
    ///
    /// The table was written empty or as a copy, and changed since by entries of the predecessor
    /// only. The table's entries therefore must not refer to metadata.
    async fn check_new_table(
        &self,
        io: &BlockingIo<'_>,
        index: u64,
        table: HostOffset,
    ) -> Result<(), Failure> {
        let (layout, file_len) = (&self.layout, self.file_len.load(Ordering::Relaxed));
        let first = index * layout.slices_per_table();
        for number in first..first + layout.slices_per_table() {
            let at = self.place_of(number, table);
            let bytes = io.read(self.storage, at, layout.slice_bytes() as usize);
            let slice = Slice::parse(number, bytes.await?.bytes(), layout);
            for n in 0..layout.slice_entries() {
                let cluster = number * layout.slice_entries() + n;
                let guest = GuestOffset::of_cluster(cluster, layout.cluster_bits());
                let cluster = layout.decode(slice.entry(n as usize), guest, file_len);
                let is_sound = cluster.is_ok_and(|cluster| {
                    let place = self.referred(&cluster);
                    place.is_none_or(|place| self.is_data(&place))
                });
                if !is_sound {
                    return Err(invented(format!("L1 entry {index}")));
                }
            }
        }
        Ok(())
    }

    fn is_data(&self, place: &Unlinked) -> bool {
        let bits = self.layout.cluster_bits();
        let mut clusters = place.clusters(bits);
        let state = self.state();
        clusters.all(|cluster| state.alloc.metadata.in_cluster(cluster).is_none())
    }

    async fn plan_entry(
        &self,
        io: &BlockingIo<'_>,
        plan: &mut Plan,
        cluster: u64,
        entry: L2Entry,
    ) -> Result<(), Failure> {
        let unlikely = || invented(format!("the entry of guest cluster {cluster}"));
        let (bits, size) = (self.layout.cluster_bits(), self.layout.cluster_size());
        if cluster >= self.size().div_ceil(size) {
            // The entry belongs to a resize in progress: it is beyond the disk's end.
            return Ok(());
        }
        let guest = GuestOffset::of_cluster(cluster, bits);
        let slice = self.slice(io, self.slice_of(guest)).await?;
        let slice = slice.ok_or_else(unlikely)?;
        let index = self.index_of(guest);
        let now = slice.0.entry(index);
        if now == entry {
            return Ok(());
        }
        let file_len = self.file_len.load(Ordering::Relaxed);
        let decode = |entry| {
            let decoded = self.layout.decode(entry, guest, file_len);
            decoded.map_err(Failure::Problem)
        };
        let (old, new) = (decode(now)?, decode(entry)?);
        if matches!(new, Cluster::Compressed(_)) {
            return Err(unlikely());
        }
        let (had, has) = (self.referred(&old), self.referred(&new));
        let mut entry = entry;
        if has == had && has.is_some() {
            // An earlier successor may have corrected the flag.
            entry = entry.with_copied(now.copied());
        } else {
            if let Some(has) = has {
                plan.claim(has.offset.cluster(bits))?;
            }
            plan.unlinked.extend(had);
        }
        let host = has.map(|has| has.offset.cluster(bits));
        plan.entries.push((slice, index, entry, host));
        Ok(())
    }

    /// Checks that the predecessor can have allocated the cluster.
    ///
    /// Sets a refcount of 0 to 1, and returns the refcount.
    async fn claim(&self, io: &BlockingIo<'_>, cluster: u64) -> Result<u64, Failure> {
        let unlikely = || invented(format!("a reference to cluster {cluster}"));
        let file_len = self.file_len.load(Ordering::Relaxed);
        if cluster >= file_len.div_ceil(self.layout.cluster_size()) {
            return Err(unlikely());
        }
        let has_refcounts = matches!(self.state().alloc.space, Space::Refcounts(_));
        let count = match has_refcounts {
            true => self.claim_refcount(io, cluster).await?,
            false => 1,
        };
        // The refcount's block, which may be new, must not be guest data's cluster, either.
        match self.state().alloc.metadata.in_cluster(cluster) {
            None => Ok(count),
            Some(_) => Err(unlikely()),
        }
    }
}

fn invented(what: String) -> Failure {
    Failure::Problem(format!("{what} cannot have been written"))
}
