//! Which clusters of an image's file are free.

mod append;
mod bytes;
mod refcounts;

use crate::HostOffset;
pub(super) use append::Append;
pub(super) use refcounts::{Moved, Refcounts};

use super::io::{Buf, Errno, Io};
use super::layout::Problem;
use super::metadata::Metadata;
use super::tables::{State, Tables, Unlinked};
use fathom_core::Op;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// By how much a file is made longer than needed, in bytes.
const AHEAD: Range<u64> = 1 << 20..64 << 20;

/// Bytes of zeroes at its new end.
const EXTENSION: usize = 4096;

/// Clusters in a row that nothing refers to yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) clusters: Range<u64>,
    /// They read as zeroes: the file has never been so long.
    pub(super) fresh: bool,
}

impl Run {
    /// Where it starts.
    pub(super) fn start(&self, cluster_bits: u32) -> HostOffset {
        HostOffset::of_cluster(self.clusters.start, cluster_bits)
    }

    pub(super) fn len(&self) -> u64 {
        self.clusters.end - self.clusters.start
    }
}

/// How an image keeps track of its clusters.
pub(super) enum Space {
    /// Nothing is ever allocated.
    ReadOnly,
    /// qcow2.
    Refcounts(Refcounts),
    /// QED: nothing is free but what comes after the end.
    Append(Append),
}

/// Behind the lock of the image's state.
pub(super) struct Allocator {
    pub(super) space: Space,
    pub(super) metadata: Metadata,
}

impl Allocator {
    /// Up to `n` clusters, or exactly so many, of those that are known to be
    /// free. None: search for more. Their refcounts are one now.
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
    /// Allocates up to `n` clusters, or exactly so many in a row.
    pub(super) async fn allocate(&self, io: &impl Io, n: u64, exact: bool) -> Result<Run, Errno> {
        let take = |alloc: &mut Allocator| alloc.take(n, exact);
        let bits = self.layout.cluster_bits();
        let end = |run: &Run| HostOffset::of_cluster(run.clusters.end, bits);
        let run = self.obtain(io, n, take, end).await?;
        self.counts.allocate(run.clusters.end - run.clusters.start);
        Ok(run)
    }

    /// What `take` gives, which ends at byte `end`, after as many searches for
    /// `n` clusters as that needs.
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

    /// Makes the file longer than it has to be, so that not every write to a
    /// new cluster does: file systems serialise writes that do (ext4, O_DIRECT,
    /// depth 32: half the speed). What was not needed is cut off in the end.
    async fn extend_ahead(&self, io: &impl Io, end: HostOffset) {
        let _extending = self.extending.lock_all().await;
        let len = self.file_len.load(Ordering::Acquire);
        if end.0 <= len || !self.file.bytes().grows() || self.cannot_extend.load(Ordering::Relaxed)
        {
            return;
        }
        // Nobody writes beyond `len` before this is done.
        let len = end.0 + (len / 4).clamp(AHEAD.start, AHEAD.end);
        let len = len.next_multiple_of(EXTENSION as u64);
        let block = Buf::new(EXTENSION);
        let at = HostOffset(len - EXTENSION as u64);
        match io.write(self.storage, at, block).await {
            Ok(()) => self.file_len.store(len, Ordering::Release),
            // There may be room for what is needed.
            Err(_) => self.cannot_extend.store(true, Ordering::Relaxed),
        }
    }

    fn try_take<T>(
        &self,
        take: impl Fn(&mut Allocator) -> Result<Option<T>, Problem>,
        end: impl Fn(&T) -> HostOffset,
    ) -> Result<Option<T>, Errno> {
        let taken = take(&mut self.state().alloc);
        let taken = self.checked(taken)?;
        if let Some(taken) = &taken {
            self.used.fetch_max(end(taken).0, Ordering::Relaxed);
            // Its refcounts are to be written.
            self.dirty.store(true, Ordering::Release);
        }
        Ok(taken)
    }

    /// Clusters that were allocated and never linked.
    pub(super) fn give_back(&self, run: &Run) {
        self.counts.free(run.clusters.end - run.clusters.start);
        self.state().alloc.give_back(run);
        self.dirty.store(true, Ordering::Release);
    }

    /// Makes more free clusters known, or fails. One task at a time.
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

    /// What was unlinked, durably: its refcounts go down. What is free and not
    /// in use by any request in flight can be taken from now on.
    pub(super) async fn release(&self, io: &impl Io, gone: &[Unlinked]) -> Result<(), Errno> {
        let bits = self.layout.cluster_bits();
        // Nobody looks for free clusters before they are known as such.
        let _searching = self.searching.lock_all().await;
        let mut free = Vec::new();
        let mut outcome = Ok(());
        for gone in gone {
            for cluster in gone.clusters(bits) {
                match self.lower(io, cluster, gone.is_table).await {
                    Ok(true) => free.push(cluster),
                    Ok(false) => {}
                    Err(errno) => outcome = Err(errno),
                }
            }
        }
        let unused = refcounts(&mut self.state()).map(|space| {
            space.freed(free);
            space.take_unused()
        });
        for clusters in runs(unused.unwrap_or_default()) {
            if self.discard {
                let len = (clusters.end - clusters.start) << bits;
                // It is advice.
                let at = HostOffset::of_cluster(clusters.start, bits);
                let _ = io.plain(self.storage, Op::Discard, at, len).await;
            }
            self.counts.free(clusters.end - clusters.start);
            if let Some(space) = refcounts(&mut self.state()) {
                space.put_back(clusters);
            }
            self.given_up.fetch_add(1, Ordering::AcqRel);
        }
        if let Some(space) = refcounts(&mut self.state()) {
            space.shrink();
        }
        outcome
    }

    /// True if that was the last reference.
    async fn lower(&self, io: &impl Io, cluster: u64, is_table: bool) -> Result<bool, Errno> {
        self.load_refcounts_of(io, cluster).await?;
        let mut state = self.state();
        let state = &mut *state;
        if is_table {
            state.alloc.metadata.remove_table(cluster..cluster + 1);
        }
        // What guest data has left may be metadata's, too, which would be given to other data next.
        if let Some(region) = state.alloc.metadata.in_cluster(cluster) {
            return self.checked(Err(format!(
                "guest data was in cluster {cluster}, which holds {region}"
            )));
        }
        let Some(space) = refcounts(state) else {
            return Ok(false);
        };
        self.dirty.store(true, Ordering::Release);
        let lowered = space.lower(cluster);
        self.checked(lowered)
    }
}

/// Numbers in a row, from numbers.
fn runs(mut numbers: Vec<u64>) -> Vec<Range<u64>> {
    numbers.sort_unstable();
    let mut runs: Vec<Range<u64>> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}

/// For parts that only refcounted images have.
pub(super) fn refcounts(state: &mut State) -> Option<&mut Refcounts> {
    match &mut state.alloc.space {
        Space::Refcounts(space) => Some(space),
        _ => None,
    }
}
