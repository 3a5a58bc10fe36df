//! Guest writes.
//!
//! A write goes in place where the host cluster belongs to the guest cluster alone. Otherwise it
//! goes to newly allocated clusters, together with a copy of the old data that the guest does not
//! overwrite.
//!
//! A write that allocates clusters
//!
//! 1. locks its guest clusters: two writes of one new cluster follow each other, and other writes
//!    do not wait;
//! 2. takes free clusters, whose refcounts rise in memory;
//! 3. reads those parts of the clusters that the guest does not write, if they have data;
//! 4. writes everything by one operation;
//! 5. links the entries, in memory, when the operation has ended.

use super::active::Active;
use super::alloc::Run;
use super::io::{Buf, Errno, Io, Payload};
use super::journal::Record;
use super::layout::Layout;
use super::segments::Source;
use super::tables::{Extent, Pinned, Tables, Unlinked};
use super::worker_io::TaskIo;
use super::write_back::all;
use crate::qcow2::{Cluster, L2Entry};
use crate::{GuestOffset, HostOffset};
use fathom_core::segments::{pieces, zeroes};
use fathom_core::{Op, Segments};
use smallvec::SmallVec;
use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::Poll;

/// Maximum number of bytes for which clusters are allocated in one step.
const MAX_AT_ONCE: u64 = 2 << 20;

/// The result of an operation.
type Outcome = Result<(), Errno>;

/// A write, or a part of one. Offsets are the guest's.
pub(super) struct Write {
    /// Guest offset of the first byte of `source`.
    pub(super) start: GuestOffset,
    pub(super) source: Source,
}

impl Write {
    fn payload(&self, range: Range<GuestOffset>) -> Payload {
        self.source
            .part(range.start - self.start..range.end - self.start)
    }
}

/// A guest cluster that is about to be written.
pub(super) struct Target {
    pub(super) slice: Pinned,
    pub(super) index: usize,
    entry: L2Entry,
    /// The host cluster of the guest cluster, if the host cluster may be written to.
    pub(super) own: Option<HostOffset>,
    /// Units that have data somewhere, and units that are zero.
    pub(super) allocated: u32,
    pub(super) zero: u32,
    /// The part of the file that its entry refers to, if the write replaces it.
    pub(super) old: Option<Unlinked>,
}

impl Active {
    /// Writes the part of `write` that lies in `range`.
    pub(super) async fn write(
        &self,
        io: &TaskIo,
        tables: &Tables,
        write: &Write,
        range: Range<GuestOffset>,
    ) -> Result<(), Errno> {
        let mut at = range.start;
        let mut started = SmallVec::<[_; 4]>::new();
        let mut outcome = Ok(());
        while at < range.end && outcome.is_ok() {
            let step = self.write_step(io, tables, write, at..range.end);
            match step.await {
                Ok((end, operation)) => {
                    started.extend(operation);
                    at = end;
                }
                Err(errno) => outcome = Err(errno),
            }
        }
        all(started).await.and(outcome)
    }

    /// Writes a first part of `range`.
    ///
    /// Returns where that part ends, and the operation that the caller has to await.
    async fn write_step(
        &self,
        io: &TaskIo,
        tables: &Tables,
        write: &Write,
        range: Range<GuestOffset>,
    ) -> Result<(GuestOffset, Option<impl Future<Output = Outcome> + use<>>), Errno> {
        let (extent, len) = tables
            .look_up(io, range.start, range.end - range.start)
            .await?;
        let end = range.start + len;
        if let Extent::Data {
            at,
            exclusive: true,
        } = extent
        {
            tables.check_target(Some(&tables.filter), at, len)?;
            let payload = write.payload(range.start..end);
            return Ok((end, Some(io.data(tables.data, Op::Write, at, payload))));
        }
        let size = tables.layout.cluster_size();
        let most = range.start.down_to(size) + MAX_AT_ONCE;
        let end = range.end.min(most.up_to(size));
        let end = self.allocating_write(io, tables, write, range.start..end);
        Ok((end.await?, None))
    }

    /// Allocates clusters for the first clusters of `range`, and writes them.
    ///
    /// Returns where that part ends. The end is the start of `range` if another task has meanwhile
    /// allocated the first cluster, which can then be written in place.
    async fn allocating_write(
        &self,
        io: &TaskIo,
        tables: &Tables,
        write: &Write,
        range: Range<GuestOffset>,
    ) -> Result<GuestOffset, Errno> {
        let bits = tables.layout.cluster_bits();
        let clusters = range.start.clusters(range.end - range.start, bits);
        let _allocating = tables.allocating.lock(clusters.clone()).await;
        let targets = tables.targets(io, clusters).await?;
        let Some(target) = targets.first() else {
            return Ok(range.start);
        };
        let range = match target.own {
            Some(_) => tables.without_allocated(target, range),
            None => range,
        };
        if range.is_empty() {
            return Ok(range.start);
        }
        self.write_locked(io, tables, write, targets, range).await
    }

    /// Writes the part of `range` that lies in these clusters, and returns where that part ends.
    ///
    /// The caller has locked the clusters, and `range` begins in the first of them.
    pub(super) async fn write_locked(
        &self,
        io: &TaskIo,
        tables: &Tables,
        write: &Write,
        mut targets: SmallVec<[Target; 4]>,
        range: Range<GuestOffset>,
    ) -> Result<GuestOffset, Errno> {
        let bits = tables.layout.cluster_bits();
        let first = range.start.cluster(bits);
        let _room = tables.make_room(io, targets.len() as u64).await?;
        let run = match targets[0].own {
            Some(_) => None,
            None if tables.has_data_file => None,
            None => Some(tables.allocate(io, targets.len() as u64, false).await?),
        };
        if let Some(run) = &run {
            targets.truncate(run.len() as usize);
        }
        let end = GuestOffset::of_cluster(first + targets.len() as u64, bits).min(range.end);
        let written = self
            .write_targets(io, tables, write, &targets, run.as_ref(), range.start..end)
            .await;
        if let (Err(_), Some(run)) = (&written, &run) {
            tables.give_back(run);
        }
        written?;
        Ok(end)
    }

    /// Writes `range` to the targets' host clusters, and links them.
    async fn write_targets(
        &self,
        io: &TaskIo,
        tables: &Tables,
        write: &Write,
        targets: &[Target],
        run: Option<&Run>,
        range: Range<GuestOffset>,
    ) -> Result<(), Errno> {
        let layout = &tables.layout;
        let start = range.start.down_to(layout.cluster_size());
        let host = match (targets[0].own, run) {
            (Some(host), _) => host,
            (None, Some(run)) => run.start(layout.cluster_bits()),
            // In an external data file every cluster is at its guest offset.
            (None, None) => start.in_data_file(),
        };
        let outer = outer(tables, targets, start, &range);
        let fresh = run.is_some_and(|run| run.fresh) && !tables.is_encrypted;
        let (head, tail) = self.fill(io, fresh, &outer, &range).await?;
        let from = match head {
            Fill::Skip => range.start,
            _ => outer.start,
        };
        let mut payload = Payload {
            segments: Segments::new(),
            keep: SmallVec::new(),
        };
        head.append(&mut payload);
        let inner = range.start - write.start..range.end - write.start;
        write.source.append(&mut payload, inner);
        tail.append(&mut payload);
        let at = host + (from - start);
        io.data(tables.data, Op::Write, at, payload).await?;
        tables.link_targets(targets, start, host, &outer);
        Ok(())
    }

    /// Returns what to write before and after the guest's data in newly written units.
    ///
    /// The data is what the guest reads there now.
    async fn fill(
        &self,
        io: &TaskIo,
        fresh: bool,
        outer: &Range<GuestOffset>,
        inner: &Range<GuestOffset>,
    ) -> Result<(Fill, Fill), Errno> {
        let (head, tail) = (outer.start..inner.start, inner.end..outer.end);
        let copies_head = !self.is_zero(io, 0, head.start, head.end).await?;
        let copies_tail = !self.is_zero(io, 0, tail.start, tail.end).await?;
        let zeroes = |range: &Range<GuestOffset>| match fresh {
            true => Fill::Skip,
            false => Fill::Zeroes(range.end - range.start),
        };
        if copies_head && copies_tail && inner.end - inner.start <= MAX_GAP {
            let all = self.read_buf(io, outer.clone()).await?;
            let tail_at = (tail.start - outer.start) as usize;
            let head_len = (head.end - head.start) as usize;
            let len = (outer.end - outer.start) as usize;
            return Ok((
                Fill::Copy(all.clone(), 0..head_len),
                Fill::Copy(all, tail_at..len),
            ));
        }
        let copy = async |copies: bool, range: &Range<GuestOffset>| match copies {
            true => {
                let len = (range.end - range.start) as usize;
                let buf = self.read_buf(io, range.clone()).await?;
                Ok::<_, Errno>(Fill::Copy(buf, 0..len))
            }
            false => Ok(zeroes(range)),
        };
        let (head, tail) = both(copy(copies_head, &head), copy(copies_tail, &tail)).await;
        Ok((head?, tail?))
    }
}

/// Maximum gap in bytes between two needed ranges that are read by one operation.
const MAX_GAP: u64 = 16 << 10;

enum Fill {
    /// The file has these bytes already.
    Skip,
    /// This number of zero bytes.
    Zeroes(u64),
    /// This part of a buffer.
    Copy(Rc<Buf>, Range<usize>),
}

impl Fill {
    fn append(self, payload: &mut Payload) {
        match self {
            Fill::Skip => {}
            Fill::Zeroes(len) => payload.segments.extend(zeroes(len)),
            Fill::Copy(buf, part) => {
                let part = part.start as u64..part.end as u64;
                payload.segments.extend(pieces(&[buf.iovec()], part));
                payload.keep.push(buf);
            }
        }
    }
}

/// Polls both futures until both are ready.
async fn both<A: Future, B: Future>(a: A, b: B) -> (A::Output, B::Output) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut of_a, mut of_b) = (None, None);
    poll_fn(|cx| {
        if of_a.is_none()
            && let Poll::Ready(output) = a.as_mut().poll(cx)
        {
            of_a = Some(output);
        }
        if of_b.is_none()
            && let Poll::Ready(output) = b.as_mut().poll(cx)
        {
            of_b = Some(output);
        }
        match (of_a.take(), of_b.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (of_a, of_b) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}

/// Returns the guest range to be written so that units are written as a whole.
///
/// The result covers all units that `range` touches, and all data of a cluster that moves. The
/// targets start at `start`.
fn outer(
    tables: &Tables,
    targets: &[Target],
    start: GuestOffset,
    range: &Range<GuestOffset>,
) -> Range<GuestOffset> {
    let (size, unit) = (tables.layout.cluster_size(), tables.layout.unit());
    let mut outer = range.start.down_to(unit)..range.end.up_to(unit);
    let moves = |target: &Target| target.own.is_none() && target.allocated != 0;
    if moves(&targets[0]) {
        outer.start = start;
    }
    if targets.last().is_some_and(moves) {
        outer.end = start + targets.len() as u64 * size;
    }
    outer
}

impl Tables {
    /// Returns the first of these clusters that can be written together, none of them in place.
    pub(super) async fn targets(
        &self,
        io: &TaskIo,
        clusters: Range<u64>,
    ) -> Result<SmallVec<[Target; 4]>, Errno> {
        let mut targets = SmallVec::<[Target; 4]>::new();
        for cluster in clusters {
            let guest = GuestOffset::of_cluster(cluster, self.layout.cluster_bits());
            let Some(target) = self.target(io, guest).await? else {
                break;
            };
            // Clusters that have a host cluster already are written one by one.
            let alone = target.own.is_some();
            if alone && !targets.is_empty() {
                break;
            }
            targets.push(target);
            if alone {
                break;
            }
        }
        Ok(targets)
    }

    /// Returns a cluster that cannot be written in place as it is; `None` if it can.
    async fn target(&self, io: &TaskIo, guest: GuestOffset) -> Result<Option<Target>, Errno> {
        let slice = self.slice_to_change(io, guest).await?;
        let index = self.index_of(guest);
        let entry = slice.0.entry(index);
        let file_len = self.file_len.load(Ordering::Relaxed);
        let cluster = self.checked_entry(self.layout.decode(entry, guest, file_len))?;
        let all = self.layout.all_units();
        let exclusive = self.layout.is_exclusive(entry);
        let (host, allocated, zero) = match cluster {
            Cluster::Data { .. } if exclusive => return Ok(None),
            Cluster::Data { host } => (Some(host), all, 0),
            Cluster::Unallocated => (None, 0, 0),
            Cluster::Zero { host } => (host, 0, all),
            Cluster::Compressed(_) => (None, all, 0),
            Cluster::Subclusters {
                host,
                allocated,
                zero,
            } => (host, allocated, zero),
        };
        let own = host.filter(|_| exclusive);
        if let Some(host) = own {
            self.check_target(None, host, self.layout.cluster_size())?;
        }
        Ok(Some(Target {
            slice,
            index,
            entry,
            own,
            allocated,
            zero,
            old: match own {
                Some(_) => None,
                None => self.referred(&cluster),
            },
        }))
    }

    /// Returns the start of `range`, in the target's cluster, up to the first unit that has data.
    ///
    /// A unit with data is written in place, by any task at any time.
    fn without_allocated(&self, target: &Target, range: Range<GuestOffset>) -> Range<GuestOffset> {
        let unit = self.layout.unit();
        let size = self.layout.cluster_size();
        let cluster = range.start.down_to(size);
        let first = (range.start.within(size) / unit) as u32;
        let free = (target.allocated >> first).trailing_zeros();
        let end = cluster + u64::from(first.saturating_add(free)) * unit;
        range.start..range.end.min(end.max(range.start))
    }

    /// Returns the part of the image's own file that an entry refers to.
    pub(super) fn referred(&self, cluster: &Cluster) -> Option<Unlinked> {
        let size = self.layout.cluster_size();
        let host = match cluster {
            Cluster::Compressed(range) => return Some(Unlinked::new(range.offset, range.len)),
            Cluster::Data { host } => Some(*host),
            Cluster::Zero { host } | Cluster::Subclusters { host, .. } => *host,
            Cluster::Unallocated => None,
        };
        host.filter(|_| !self.has_data_file)
            .map(|host| Unlinked::new(host, size))
    }

    /// Links the targets, which start at guest offset `start`, to their data at `host`.
    ///
    /// The units of `outer` have data from now on.
    fn link_targets(
        &self,
        targets: &[Target],
        start: GuestOffset,
        host: HostOffset,
        outer: &Range<GuestOffset>,
    ) {
        let (size, unit) = (self.layout.cluster_size(), self.layout.unit());
        let all = self.layout.all_units();
        let mut state = self.state();
        for (n, target) in targets.iter().enumerate() {
            let n = n as u64;
            let cluster = start + n * size;
            let from = outer.start.max(cluster) - cluster;
            let to = outer.end.min(cluster + size) - cluster;
            let written = (all >> (size / unit - (to - from) / unit)) << (from / unit);
            let allocated = target.allocated | written;
            let zero = target.zero & !written;
            let entry = self.layout.entry(Some(host + n * size), allocated, zero);
            debug_assert_ne!(entry, target.entry);
            state.unlink(target.old, self.layout.cluster_bits());
            self.link(&mut state, &target.slice, target.index, entry);
        }
    }

    /// Returns the slice of a guest byte, in a table that may be changed.
    pub(super) async fn slice_to_change(
        &self,
        io: &impl Io,
        guest: GuestOffset,
    ) -> Result<Pinned, Errno> {
        let number = self.slice_of(guest);
        self.make_table(io, self.l1_index(number)).await?;
        let slice = self.slice(io, number).await?;
        slice.ok_or(libc::EIO)
    }

    /// Makes an L1 entry own its L2 table: creates the table, or copies a shared one.
    async fn make_table(&self, io: &impl Io, index: usize) -> Result<(), Errno> {
        let exclusive = |entry: u64| entry != 0 && self.layout.table_is_exclusive(entry);
        if exclusive(self.l1.entry(index).load(Ordering::Acquire)) {
            return Ok(());
        }
        let number = index as u64;
        let _making = self.making.lock(number..number + 1).await;
        let entry = self.l1.entry(index).load(Ordering::Acquire);
        if exclusive(entry) {
            return Ok(());
        }
        let file_len = self.file_len.load(Ordering::Relaxed);
        let old = self.checked(self.layout.table(entry, file_len))?;
        let (bits, len) = (self.layout.cluster_bits(), self.layout.table_bytes());
        let _room = self.make_room(io, 1).await?;
        let run = self.allocate(io, len >> bits, true).await?;
        let at = run.start(bits);
        let written = match old {
            Some(old) => match io.read(self.storage, old, len as usize).await {
                Ok(table) => io.write(self.storage, at, table).await,
                Err(errno) => Err(errno),
            },
            // The fresh clusters of a QED image read as zeroes.
            None if run.fresh && matches!(self.layout, Layout::Qed(_)) => Ok(()),
            // Otherwise the table must be zeroed before the L1 entry refers to it.
            None => io.write(self.storage, at, Buf::new(len as usize)).await,
        };
        if let Err(errno) = written {
            self.give_back(&run);
            return Err(errno);
        }
        let mut state = self.state();
        if let Some(journal) = &mut state.journal {
            journal.append(Record::L1 {
                index: number,
                entry: self.layout.l1_entry(at),
            });
        }
        state.alloc.metadata.add_table(run.clusters);
        state.unlinked.extend(old.map(|offset| Unlinked {
            offset,
            len,
            is_table: true,
        }));
        self.set_dirty(&mut state);
        self.l1
            .entry(index)
            .store(self.layout.l1_entry(at), Ordering::Release);
        state.dirty_l1.insert(index);
        Ok(())
    }
}
