//! Space for compressed clusters. Several share a host cluster, whose refcount is their number.

use super::{Allocator, Refcounts, Space};
use crate::HostOffset;
use crate::served::io::{Errno, Io};
use crate::served::layout::Problem;
use crate::served::tables::Tables;
use std::ops::Range;

/// Places of some pieces, one after the other.
#[derive(Debug)]
pub(in crate::served) struct Packed {
    /// Offset of each piece, in order. Only of the first pieces if there is no room for all of them
    /// next to each other.
    pub(in crate::served) places: Vec<HostOffset>,
    /// End of the space that was taken: a multiple of the unit.
    pub(in crate::served) end: HostOffset,
}

impl Refcounts {
    /// Takes room for at least the first of these pieces, each smaller than a cluster.
    ///
    /// The room starts and ends at multiples of `unit`, so that bytes written before are not
    /// written again. `None`: the caller has to search for more free clusters.
    pub(super) fn take_bytes(&mut self, lens: &[u64], unit: u64) -> Option<Packed> {
        let (bits, size) = (self.g.cluster_bits, self.g.cluster_size());
        let open = self.open.filter(|at| self.has_room(at.cluster(bits)));
        // The next free byte, and the end of the last cluster that was taken.
        let mut at = open.unwrap_or_default();
        let mut end = at.up_to(size);
        let mut places = Vec::with_capacity(lens.len());
        for len in lens {
            if at < end && !self.has_room(at.cluster(bits)) {
                at = end;
            }
            if at + *len > end {
                if at.0 != 0 && self.take_cluster(end.cluster(bits)) {
                    end += size;
                } else if places.is_empty() {
                    let run = self.take(1, true)?;
                    at = run.start(bits);
                    end = at + size;
                    self.set(run.clusters.start, 0);
                } else {
                    break;
                }
            }
            for cluster in at.clusters(*len, bits) {
                self.set(cluster, self.get(cluster) + 1);
            }
            places.push(at);
            at += *len;
        }
        let end = at.up_to(unit);
        self.open = (end.within(size) != 0).then_some(end);
        Some(Packed { places, end })
    }

    /// Takes this cluster, if a run of known free clusters starts with it. The cluster's refcount
    /// stays 0.
    fn take_cluster(&mut self, cluster: u64) -> bool {
        let Some(position) = self.free.iter().position(|run| run.start == cluster) else {
            return false;
        };
        let run = &mut self.free[position];
        run.start += 1;
        if run.start == run.end {
            self.free.remove(position);
        }
        true
    }

    /// Returns whether the cluster's refcount is in memory and below its maximum.
    fn has_room(&self, cluster: u64) -> bool {
        let max = u64::MAX >> (64 - (1 << self.g.refcount_order));
        self.blocks.contains_key(&self.block_of(cluster)) && self.get(cluster) < max
    }

    /// Releases the bytes of a piece, which nothing has ever referred to.
    fn give_back_bytes(&mut self, bytes: Range<HostOffset>) -> Result<(), Problem> {
        let bits = self.g.cluster_bits;
        for cluster in bytes.start.clusters(bytes.end - bytes.start, bits) {
            // If its block has left memory meanwhile, the cluster is leaked.
            if self.blocks.contains_key(&self.block_of(cluster)) && self.lower(cluster)? {
                self.returned.insert(cluster..cluster + 1);
            }
        }
        Ok(())
    }
}

impl Allocator {
    fn take_bytes(&mut self, lens: &[u64], unit: u64) -> Result<Option<Packed>, Problem> {
        let Space::Refcounts(space) = &mut self.space else {
            return Ok(None);
        };
        let bits = space.g.cluster_bits;
        let packed = space.take_bytes(lens, unit);
        if let Some(packed) = &packed {
            let start = packed.places[0];
            self.check_taken(start.clusters(packed.end - start, bits))?;
        }
        Ok(packed)
    }
}

impl Tables {
    /// Allocates room for at least the first of these pieces.
    pub(in crate::served) async fn allocate_bytes(
        &self,
        io: &impl Io,
        lens: &[u64],
    ) -> Result<Packed, Errno> {
        let size = self.layout.cluster_size();
        let block = self.file.disk().info().physical_block_size;
        let unit = u64::from(block).clamp(512, size.min(4096));
        let take = |alloc: &mut Allocator| alloc.take_bytes(lens, unit);
        let end = |packed: &Packed| packed.end.up_to(size);
        self.obtain(io, 1, take, end).await
    }

    /// Releases the bytes of a piece that was not written.
    pub(in crate::served) fn give_back_bytes(&self, bytes: Range<HostOffset>) {
        let mut state = self.state();
        if let Some(space) = super::refcounts(&mut state) {
            let given_back = space.give_back_bytes(bytes);
            debug_assert!(given_back.is_ok());
        }
        self.set_dirty(&mut state);
    }
}
