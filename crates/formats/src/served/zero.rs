//! Zeroing and discards, which mostly change entries only.

use super::active::Active;
use super::io::{Errno, Io};
use super::layout::Layout;
use super::segments::Source;
use super::tables::{Pinned, Tables, Unlinked};
use super::worker_io::TaskIo;
use super::write::Write;
use crate::qcow2::{Cluster, L2Entry};
use crate::{GuestOffset, HostOffset};
use fathom_core::Op;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Maximum number of clusters that are changed in one step.
const MAX_AT_ONCE: u64 = 512;

/// How a range is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Empty {
    /// The range reads as zeroes afterwards; `unmap`: its clusters may be released.
    Zero { unmap: bool },
    /// The data is not needed any more; concerns whole clusters only.
    Discard,
}

/// How a cluster is emptied.
enum Change {
    Nothing,
    /// Set this entry, and release what the old one referred to.
    Entry(L2Entry, Option<Unlinked>),
    /// Zero or discard the host cluster in place.
    InPlace(HostOffset),
    /// Write zeroes as data.
    Write,
}

impl Active {
    /// Empties `range`.
    pub(super) async fn empty(
        &self,
        io: &TaskIo,
        tables: &Tables,
        how: Empty,
        range: Range<GuestOffset>,
    ) -> Result<(), Errno> {
        let size = tables.layout.cluster_size();
        let mut at = range.start;
        while at < range.end {
            let whole = at.up_to(size)..self.last_whole(tables, range.end);
            let end = if at < whole.start || whole.is_empty() {
                let end = range.end.min((at + 1).up_to(size));
                if how != Empty::Discard {
                    self.write_zeroes(io, tables, at..end).await?;
                }
                end
            } else {
                let end = whole.end.min(at + MAX_AT_ONCE * size);
                self.empty_clusters(io, tables, how, at..end).await?;
                end
            };
            at = end;
        }
        Ok(())
    }

    /// Returns the end of the last cluster that a range up to `end` covers entirely.
    ///
    /// A disk can end within its last cluster, which then counts as covered.
    fn last_whole(&self, tables: &Tables, end: GuestOffset) -> GuestOffset {
        let size = tables.layout.cluster_size();
        match end.0 == tables.size() {
            true => end.up_to(size),
            false => end.down_to(size),
        }
    }

    /// Writes zeroes, unless the range reads as zeroes already.
    async fn write_zeroes(
        &self,
        io: &TaskIo,
        tables: &Tables,
        range: Range<GuestOffset>,
    ) -> Result<(), Errno> {
        let end = range.end.min(GuestOffset(tables.size()));
        if !self.rebasing && self.is_zero(io, 0, range.start, end).await? {
            return Ok(());
        }
        let write = Write {
            start: range.start,
            source: Source::Zeroes,
        };
        self.write(io, tables, &write, range.start..end).await
    }

    /// Empties whole clusters.
    async fn empty_clusters(
        &self,
        io: &TaskIo,
        tables: &Tables,
        how: Empty,
        range: Range<GuestOffset>,
    ) -> Result<(), Errno> {
        let bits = tables.layout.cluster_bits();
        let clusters = range.start.cluster(bits)..range.end.cluster(bits);
        let mut by_hand = Vec::new();
        let allocating = tables.allocating.lock(clusters.clone()).await;
        for cluster in clusters {
            let guest = GuestOffset::of_cluster(cluster, bits);
            let Some((slice, entry, below)) = self.to_empty(io, tables, how, guest).await? else {
                continue;
            };
            let file_len = tables.file_len.load(Ordering::Relaxed);
            let old = tables.checked_entry(tables.layout.decode(entry, guest, file_len))?;
            match tables.change(how, &old, entry, below) {
                Change::Nothing => {}
                Change::Entry(new, unlinked) => {
                    // Room is not reserved for all clusters at once: a task that holds room must
                    // not wait for tasks that may be waiting for room.
                    let _room = tables.make_room(io, 1).await?;
                    tables.zero_data_file(io, &old).await?;
                    let mut state = tables.state();
                    state.unlink(unlinked, bits);
                    let index = tables.index_of(guest);
                    tables.link(&mut state, &slice, index, new);
                }
                Change::InPlace(host) => {
                    let op = match how {
                        Empty::Discard => Op::Discard,
                        Empty::Zero { .. } => Op::WriteZeroes,
                    };
                    tables.check_target(None, host, 1 << bits)?;
                    io.plain(tables.data, op, host, 1 << bits).await?;
                }
                Change::Write => by_hand.push(guest),
            }
        }
        drop(allocating);
        for guest in by_hand {
            let range = guest..guest + (1 << bits);
            self.write_zeroes(io, tables, range).await?;
        }
        Ok(())
    }

    /// Returns the slice and entry of a cluster to be emptied, and whether data is below it.
    ///
    /// `None`: the cluster is empty already.
    async fn to_empty(
        &self,
        io: &TaskIo,
        tables: &Tables,
        how: Empty,
        guest: GuestOffset,
    ) -> Result<Option<(Pinned, L2Entry, bool)>, Errno> {
        let number = tables.slice_of(guest);
        let size = tables.layout.cluster_size();
        let end = (guest + size).min(GuestOffset(tables.size()));
        let there = tables.slice(io, number).await?;
        let below = self.rebasing || !self.is_zero(io, 1, guest, end).await?;
        if there.is_none() && (!below || how == Empty::Discard) {
            return Ok(None);
        }
        drop(there);
        let slice = tables.slice_to_change(io, guest).await?;
        let entry = slice.0.entry(tables.index_of(guest));
        Ok(Some((slice, entry, below)))
    }
}

impl Tables {
    /// Decides how a cluster is emptied; `below`: the backing image has data there.
    fn change(&self, how: Empty, old: &Cluster, entry: L2Entry, below: bool) -> Change {
        let all = self.layout.all_units();
        let own = match old {
            Cluster::Data { host } => Some(*host),
            Cluster::Zero { host } | Cluster::Subclusters { host, .. } => *host,
            _ => None,
        };
        let own = own.filter(|_| self.layout.is_exclusive(entry));
        let gives_up = how != Empty::Zero { unmap: false };
        // A data file has one place for each cluster, which no other cluster can use. QED has no
        // free clusters.
        let keeps = self.has_data_file || !gives_up;
        let stays = self.has_data_file || matches!(self.layout, Layout::Qed(_));
        match old {
            Cluster::Unallocated if !below || how == Empty::Discard => Change::Nothing,
            Cluster::Zero { host: None } => Change::Nothing,
            Cluster::Zero { .. } if keeps => Change::Nothing,
            Cluster::Data { host } if stays => Change::InPlace(*host),
            // Subclusters with data keep it, and the data is zeroed: a write in place may still be
            // in flight. Readers of the data file by itself must see what the guest sees.
            Cluster::Subclusters { allocated, .. } if self.has_data_file && *allocated != 0 => {
                let zero = all & !allocated;
                Change::Entry(self.layout.entry(own, *allocated, zero), None)
            }
            _ if self.layout.has_zero_clusters() => {
                let kept = own.filter(|_| keeps);
                let zero = if below || kept.is_some() || how != Empty::Discard {
                    all
                } else {
                    0
                };
                let unlinked = match kept {
                    Some(_) => None,
                    None => self.referred(old),
                };
                Change::Entry(self.layout.entry(kept, 0, zero), unlinked)
            }
            _ if !below && gives_up => Change::Entry(L2Entry::default(), self.referred(old)),
            _ if how == Empty::Discard => Change::Nothing,
            Cluster::Data { host } if own.is_some() => Change::InPlace(*host),
            _ => Change::Write,
        }
    }

    /// Zeroes the cluster in an external data file, which must match the entries if it is raw.
    async fn zero_data_file(&self, io: &TaskIo, old: &Cluster) -> Result<(), Errno> {
        if !self.has_data_file {
            return Ok(());
        }
        let host = match old {
            Cluster::Data { host } => *host,
            Cluster::Zero { host: Some(host) } => *host,
            Cluster::Subclusters {
                host: Some(host), ..
            } => *host,
            _ => return Ok(()),
        };
        io.plain(self.data, Op::WriteZeroes, host, self.layout.cluster_size())
            .await
    }
}
