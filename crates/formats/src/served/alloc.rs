//! Allocates and frees clusters of an image's file.

mod append;
mod bytes;
mod refcounts;
mod runs;

use crate::HostOffset;
pub(super) use append::Append;
pub(super) use refcounts::{Moved, Refcounts};
pub(super) use runs::Runs;

use super::io::{Buf, Errno, Io};
use super::layout::Problem;
use super::metadata::Metadata;
use super::tables::{State, Tables, Unlinked};
use fathom_core::Op;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Range of bytes by which a file is made longer than needed.
const AHEAD: Range<u64> = 1 << 20..64 << 20;

/// Maximum number of discards in flight for one flush.
const DISCARDS: usize = 32;

/// Bytes of zeroes that are written at the file's new end.
const EXTENSION: usize = 4096;

/// A range of adjacent clusters that nothing refers to yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) clusters: Range<u64>,
    /// Whether the clusters read as zeroes, since the file was never long enough to include them.
    pub(super) fresh: bool,
}

impl Run {
    /// Returns the offset of the first cluster.
    pub(super) fn start(&self, cluster_bits: u32) -> HostOffset {
        HostOffset::of_cluster(self.clusters.start, cluster_bits)
    }

    pub(super) fn len(&self) -> u64 {
        self.clusters.end - self.clusters.start
    }
}

/// How an image keeps track of its clusters.
pub(super) enum Space {
    /// The image is read-only; nothing is ever allocated.
    ReadOnly,
    /// qcow2: refcounts.
    Refcounts(Box<Refcounts>),
    /// QED: only clusters after the end of the file are free.
    Append(Append),
}

/// The free space and the metadata regions, behind the lock of the image's state.
pub(super) struct Allocator {
    pub(super) space: Space,
    pub(super) metadata: Metadata,
}

impl Allocator {
    /// Takes up to `n` adjacent clusters, or exactly `n`, of those that are known to be free.
    ///
    /// Sets their refcounts to one. `None`: the caller has to search for more free clusters.
    fn take(&mut self, n: u64, exact: bool) -> Result<Option<Run>, Problem> {
        let run = match &mut self.space {
            Space::ReadOnly => None,
            Space::Refcounts(space) => space.take(n, exact),
            Space::Append(space) => space.take(n, exact),
        };
        if let Some(run) = &run {
            self.check_taken(run.clusters.clone())?;
        }
        Ok(run)
    }

    fn check_taken(&self, mut clusters: Range<u64>) -> Result<(), Problem> {
        let hit = clusters.find_map(|c| Some((c, self.metadata.in_cluster(c)?)));
        match hit {
            None => Ok(()),
            Some((cluster, region)) => Err(format!(
                "cluster {cluster} is free by its refcount but holds {region}"
            )),
        }
    }

    fn give_back(&mut self, run: &Run) {
        match &mut self.space {
            Space::ReadOnly => {}
            Space::Refcounts(space) => space.give_back(run),
            Space::Append(space) => space.give_back(run),
        }
    }
}

impl Tables {
    /// Allocates up to `n` adjacent clusters, or exactly `n`.
    pub(super) async fn allocate(&self, io: &impl Io, n: u64, exact: bool) -> Result<Run, Errno> {
        let take = |alloc: &mut Allocator| alloc.take(n, exact);
        let bits = self.layout.cluster_bits();
        let end = |run: &Run| HostOffset::of_cluster(run.clusters.end, bits);
        let run = self.obtain(io, n, take, end).await?;
        self.counts.allocate(run.clusters.end - run.clusters.start);
        Ok(run)
    }

    /// Calls `take` until it succeeds, and searches for `n` free clusters before each retry.
    ///
    /// `end` returns the end of the allocated range in the file.
    async fn obtain<T>(
        &self,
        io: &impl Io,
        n: u64,
        take: impl Fn(&mut Allocator) -> Result<Option<T>, Problem>,
        end: impl Fn(&T) -> HostOffset,
    ) -> Result<T, Errno> {
        let taken = loop {
            if let Some(taken) = self.try_take(&take, &end)? {
                break taken;
            }
            let _searching = self.searching.lock_all().await;
            if let Some(taken) = self.try_take(&take, &end)? {
                break taken;
            }
            self.search(io, n).await?;
        };
        let end = end(&taken);
        if end.0 > self.file_len.load(Ordering::Acquire) {
            self.extend_ahead(io, end).await;
        }
        Ok(taken)
    }

    /// Makes the file longer than needed, so that few writes to a new cluster change its length.
    ///
    /// File systems serialise writes that make a file longer (ext4, O_DIRECT, depth 32: half the
    /// speed). The unused end is cut off when the image is deactivated.
    async fn extend_ahead(&self, io: &impl Io, end: HostOffset) {
        let _extending = self.extending.lock_all().await;
        let len = self.file_len.load(Ordering::Acquire);
        if end.0 <= len || !self.file.bytes().grows() || self.cannot_extend.load(Ordering::Relaxed)
        {
            return;
        }
        // A task that has allocated clusters beyond `len` waits for this lock before it writes
        // there. New refcount blocks are reserved with this lock, and are below `file_len` then.
        let len = end.0 + (len / 4).clamp(AHEAD.start, AHEAD.end);
        let len = len.next_multiple_of(EXTENSION as u64);
        let block = Buf::new(EXTENSION);
        let at = HostOffset(len - EXTENSION as u64);
        match io.write(self.storage, at, block).await {
            Ok(()) => self.file_len.store(len, Ordering::Release),
            // The file system may still have room for the clusters that are needed.
            Err(_) => self.cannot_extend.store(true, Ordering::Relaxed),
        }
    }

    fn try_take<T>(
        &self,
        take: impl Fn(&mut Allocator) -> Result<Option<T>, Problem>,
        end: impl Fn(&T) -> HostOffset,
    ) -> Result<Option<T>, Errno> {
        let taken = {
            let mut state = self.state();
            // Each allocation changes refcounts.
            let taken = take(&mut state.alloc);
            if !matches!(taken, Ok(None)) {
                self.set_dirty(&mut state);
            }
            taken
        };
        let taken = self.checked(taken)?;
        if let Some(taken) = &taken {
            self.used.fetch_max(end(taken).0, Ordering::Relaxed);
        }
        Ok(taken)
    }

    /// Returns clusters that were allocated and never linked.
    pub(super) fn give_back(&self, run: &Run) {
        self.counts.free(run.clusters.end - run.clusters.start);
        let mut state = self.state();
        state.alloc.give_back(run);
        self.set_dirty(&mut state);
    }

    /// Finds more free clusters, or fails. Only one task may search at a time.
    async fn search(&self, io: &impl Io, n: u64) -> Result<(), Errno> {
        let append = match &self.state().alloc.space {
            Space::ReadOnly => return Err(libc::EROFS),
            Space::Refcounts(_) => false,
            Space::Append(_) => true,
        };
        match append {
            true => self.extend_file(io, n).await,
            false => self.search_refcounts(io, n).await,
        }
    }

    /// Durably lowers the refcounts of unlinked clusters.
    ///
    /// A cluster whose refcount is now 0 and that no request in flight uses can be allocated from
    /// now on, or waits for [`Tables::discard_freed`].
    pub(super) async fn release(&self, io: &impl Io, gone: &[Unlinked]) -> Result<(), Errno> {
        let bits = self.layout.cluster_bits();
        // No task may search for free clusters before the freed ones are known.
        let _searching = self.searching.lock_all().await;
        let mut free = Runs::default();
        let mut outcome = Ok(());
        for gone in gone {
            for cluster in gone.clusters(bits) {
                match self.lower(io, cluster, gone.is_table).await {
                    Ok(true) => free.insert(cluster..cluster + 1),
                    Ok(false) => {}
                    Err(errno) => outcome = Err(errno),
                }
            }
        }
        if let Some(space) = refcounts(&mut self.state()) {
            space.freed(free);
            let reused = space.reuse(self.discard);
            space.shrink();
            self.reused(reused);
        }
        outcome
    }

    /// Discards free clusters in the file, several runs at once; then they can be allocated.
    ///
    /// The caller holds no lock. Only a write that found no room (`reclaim`) and the deactivation
    /// of the image wait for it.
    pub(super) async fn discard_freed(&self, io: &impl Io) {
        if !self.has_to_discard() {
            return;
        }
        let bits = self.layout.cluster_bits();
        let number = self.discards.fetch_add(1, Ordering::Relaxed);
        let _discarding = self.discarding.lock(number..number + 1).await;
        loop {
            let next = refcounts(&mut self.state()).map(|space| space.next_to_discard(DISCARDS));
            let runs = next.unwrap_or_default();
            if runs.is_empty() {
                return;
            }
            let start = |run: Range<u64>| {
                let at = HostOffset::of_cluster(run.start, bits);
                let len = (run.end - run.start) << bits;
                (io.plain(self.storage, Op::Discard, at, len), run)
            };
            let started: Vec<_> = runs.into_iter().map(start).collect();
            for (discard, run) in started {
                // A discard is advice, so its errors are ignored.
                let _ = discard.await;
                let clusters = run.end - run.start;
                if let Some(space) = refcounts(&mut self.state()) {
                    space.discarded(run);
                }
                self.reused(clusters);
            }
        }
    }

    /// Returns whether free clusters wait for their discard.
    pub(super) fn has_to_discard(&self) -> bool {
        let waits = |space: &mut Refcounts| space.has_to_discard();
        self.discard && refcounts(&mut self.state()).is_some_and(waits)
    }

    /// Counts clusters that the guest had freed and that can be allocated again.
    fn reused(&self, clusters: u64) {
        if clusters > 0 {
            self.counts.free(clusters);
            self.given_up.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Lowers a cluster's refcount; true if that was the last reference.
    async fn lower(&self, io: &impl Io, cluster: u64, is_table: bool) -> Result<bool, Errno> {
        self.load_refcounts_of(io, cluster).await?;
        let mut state = self.state();
        let state = &mut *state;
        if is_table {
            state.alloc.metadata.remove_table(cluster..cluster + 1);
        }
        // The freed guest cluster may also hold metadata, which an allocation would then overwrite.
        if let Some(region) = state.alloc.metadata.in_cluster(cluster) {
            return self.checked(Err(format!(
                "guest data was in cluster {cluster}, which holds {region}"
            )));
        }
        self.set_dirty(state);
        let Some(space) = refcounts(state) else {
            return Ok(false);
        };
        let lowered = space.lower(cluster);
        self.checked(lowered)
    }
}

/// Returns the refcounts; `None` for formats that have none.
pub(super) fn refcounts(state: &mut State) -> Option<&mut Refcounts> {
    match &mut state.alloc.space {
        Space::Refcounts(space) => Some(space),
        _ => None,
    }
}
