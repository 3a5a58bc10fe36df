//! Copy-on-read: copies data that the guest reads from the backing chain into the top image.

use super::active::Active;
use super::io::Errno;
use super::segments::Source;
use super::tables::{Extent, Tables};
use super::worker_io::TaskIo;
use super::write::{Target, Write};
use crate::GuestOffset;
use fathom_core::is_zero;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Maximum number of bytes that are copied in one step.
const MAX_AT_ONCE: u64 = 2 << 20;

impl Active {
    /// Copies all units that `range` touches and that the top image does not have.
    pub(super) async fn copy_up(
        &self,
        io: &TaskIo,
        tables: &Tables,
        range: Range<GuestOffset>,
    ) -> Result<(), Errno> {
        let unit = tables.layout.unit();
        let end = range.end.up_to(unit).min(GuestOffset(tables.size()));
        let mut at = range.start.down_to(unit);
        while at < end {
            at = self.copy_up_step(io, tables, at..end).await?;
        }
        tables.limit_dirty(io).await
    }

    /// Copies the first part of `range` and returns where that part ends.
    async fn copy_up_step(
        &self,
        io: &TaskIo,
        tables: &Tables,
        range: Range<GuestOffset>,
    ) -> Result<GuestOffset, Errno> {
        let (bits, size) = (tables.layout.cluster_bits(), tables.layout.cluster_size());
        let at = range.start;
        let end = range.end.min(at.down_to(size) + MAX_AT_ONCE.max(size));
        let (extent, len) = tables.look_up(io, at, end - at).await?;
        if extent != Extent::Below {
            return Ok(at + len);
        }
        let _allocating = tables.allocating.lock(at.clusters(len, bits)).await;
        // Another task may have copied the range meanwhile.
        let (extent, len) = tables.look_up(io, at, len).await?;
        if extent != Extent::Below {
            return Ok(at + len);
        }
        if tables.corrupt.load(Ordering::Relaxed) {
            return Err(libc::EIO);
        }
        let range = at..at + len;
        let targets = tables.targets(io, at.clusters(len, bits)).await?;
        // (A cluster that has some of its units already is a target of its own.)
        let end = GuestOffset::of_cluster(at.cluster(bits) + targets.len() as u64, bits);
        let range = range.start..range.end.min(end);
        let is_empty = self.is_zero(io, 1, range.start, range.end).await?;
        if is_empty && tables.link_zeroes(io, &targets, &range).await? {
            return Ok(range.end);
        }
        let buf = self.read_buf(io, range.clone()).await?;
        if !is_empty && is_zero(buf.bytes()) && tables.link_zeroes(io, &targets, &range).await? {
            return Ok(range.end);
        }
        let write = Write {
            start: range.start,
            source: Source::Own(buf),
        };
        self.write_locked(io, tables, &write, targets, range).await
    }
}

impl Tables {
    /// Makes `range` read as zeroes without allocating data; false if the entries cannot express
    /// that.
    async fn link_zeroes(
        &self,
        io: &TaskIo,
        targets: &[Target],
        range: &Range<GuestOffset>,
    ) -> Result<bool, Errno> {
        let are_nowhere = |t: &Target| t.own.is_none() && t.allocated == 0 && t.old.is_none();
        if !self.layout.has_zero_clusters() || !targets.iter().all(are_nowhere) {
            return Ok(false);
        }
        let (size, unit) = (self.layout.cluster_size(), self.layout.unit());
        let start = range.start.down_to(size);
        let _room = self.make_room(io, targets.len() as u64).await?;
        let mut state = self.state();
        for (n, target) in (0..).zip(targets) {
            let cluster = start + n * size;
            let from = (range.start.max(cluster) - cluster) / unit;
            let to = (range.end.min(cluster + size) - cluster).div_ceil(unit);
            let all = u64::from(self.layout.all_units());
            let units = (all << from) & all & !(u64::MAX << to);
            let entry = self.layout.entry(None, 0, target.zero | units as u32);
            self.link(&mut state, &target.slice, target.index, entry);
        }
        Ok(true)
    }
}
