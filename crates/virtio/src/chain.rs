//! Walks a descriptor chain (2.7.5, 2.8.6), direct or indirect.

use crate::descriptor::Descriptor;
use crate::memory::{GuestMemory, RegionCache, is_aligned, pair_of, read_pair};
use crate::queue::layout::DESCRIPTOR_SIZE;
use crate::ring::Ring;
use std::ptr::NonNull;

/// Maximum number of entries of an indirect table. Drivers make tables no larger than `seg_max`
/// plus header and status.
pub(crate) const MAX_INDIRECT: u32 = 1024;

/// The chain is malformed or ends without a byte for the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unusable;

/// Copy of an indirect table that cannot be read in place, because it spans regions or is not
/// aligned. No known driver uses such tables, so the copy is allocated on demand.
#[derive(Default)]
pub(crate) struct TableCopy(Vec<[u64; 2]>);

/// Context for reading chains; the same for all chains of a queue.
pub(crate) struct ChainContext<'a, R> {
    pub queue: &'a R,
    pub memory: &'a GuestMemory,
    pub cache: &'a mut RegionCache,
    pub copy: &'a mut TableCopy,
    /// The driver may use indirect descriptors.
    pub indirect: bool,
}

/// A position in a descriptor table. Each descriptor is copied once. The struct is small, and cold
/// functions take it by value, so that it stays in registers.
#[derive(Clone, Copy)]
pub(crate) struct Chain {
    /// Table of `entries` descriptors, 8-byte aligned: the queue's own, or an indirect one in guest
    /// memory or in a `TableCopy`.
    table: NonNull<u8>,
    entries: u32,
    /// Number of descriptors that may still follow; a chain with more of them has a loop.
    left: u32,
    is_indirect: bool,
}

impl Chain {
    /// Begins the chain whose first descriptor, `first`, is in the queue's table.
    #[inline(always)]
    pub fn begin<R: Ring>(
        cx: &mut ChainContext<R>,
        first: Descriptor,
    ) -> Result<(Chain, Descriptor), Unusable> {
        let entries = u32::from(cx.queue.size());
        let chain = Chain {
            table: cx.queue.table(),
            entries,
            left: entries - 1,
            is_indirect: false,
        };
        if first.is_indirect() {
            return chain.descend(cx, first);
        }
        Ok((chain, first))
    }

    /// Returns the descriptor after `descriptor`, or none after the last.
    #[inline(always)]
    pub fn after<R: Ring>(
        &mut self,
        cx: &mut ChainContext<R>,
        descriptor: Descriptor,
    ) -> Result<Option<Descriptor>, Unusable> {
        let Some(index) = descriptor.next() else {
            return Ok(None);
        };
        let mut next = self.read::<R>(index)?;
        if next.is_indirect() {
            (*self, next) = self.descend_late(cx, next)?;
        }
        Ok(Some(next))
    }

    #[inline(always)]
    fn read<R: Ring>(&mut self, index: u32) -> Result<Descriptor, Unusable> {
        if index >= self.entries || self.left == 0 {
            return Err(Unusable);
        }
        self.left -= 1;
        // SAFETY: the whole table is mapped and aligned, and `index` lies in it.
        let pair = unsafe { read_pair(self.table.add(index as usize * DESCRIPTOR_SIZE)) };
        if R::PACKED && self.is_indirect {
            return Ok(Descriptor::from_packed_table(pair, index, self.entries));
        }
        Ok(Descriptor::new(pair))
    }

    /// Continues in the table to which `descriptor` refers (2.7.5.3), with the table's first
    /// descriptor.
    #[inline(always)]
    fn descend<R: Ring>(
        self,
        cx: &mut ChainContext<R>,
        descriptor: Descriptor,
    ) -> Result<(Chain, Descriptor), Unusable> {
        let len = descriptor.len();
        let entries = len / DESCRIPTOR_SIZE as u32;
        let well_formed = (len as usize).is_multiple_of(DESCRIPTOR_SIZE)
            && (1..=MAX_INDIRECT).contains(&entries)
            && descriptor.next().is_none();
        // Tables do not nest.
        if !cx.indirect || self.is_indirect || !well_formed {
            return Err(Unusable);
        }
        let table = match cx.translate(descriptor.addr(), u64::from(len)) {
            Some(table) if is_aligned(table) => table,
            _ => cx.copy_table(descriptor.addr(), entries)?,
        };
        let mut chain = Chain {
            table,
            entries,
            left: entries,
            is_indirect: true,
        };
        let first = chain.read::<R>(0)?;
        if first.is_indirect() {
            Err(Unusable)
        } else {
            Ok((chain, first))
        }
    }

    /// Enters an indirect table that follows direct descriptors. Devices of split queues must
    /// accept such a table, but no driver creates one. Packed queues do not have such tables.
    #[cold]
    #[inline(never)]
    fn descend_late<R: Ring>(
        self,
        cx: &mut ChainContext<R>,
        descriptor: Descriptor,
    ) -> Result<(Chain, Descriptor), Unusable> {
        if R::PACKED {
            return Err(Unusable);
        }
        self.descend(cx, descriptor)
    }
}

impl<R> ChainContext<'_, R> {
    #[inline(always)]
    pub fn translate(&mut self, gpa: u64, len: u64) -> Option<NonNull<u8>> {
        self.cache.translate(self.memory, gpa, len)
    }

    #[inline(always)]
    pub fn read_pair(&mut self, gpa: u64) -> Option<[u64; 2]> {
        self.cache.read_pair(self.memory, gpa)
    }

    #[cold]
    #[inline(never)]
    fn copy_table(&mut self, gpa: u64, entries: u32) -> Result<NonNull<u8>, Unusable> {
        let table = &mut self.copy.0;
        table.clear();
        for index in 0..u64::from(entries) {
            let mut bytes = [0; DESCRIPTOR_SIZE];
            let at = gpa
                .checked_add(index * DESCRIPTOR_SIZE as u64)
                .ok_or(Unusable)?;
            self.cache
                .read(self.memory, at, &mut bytes)
                .ok_or(Unusable)?;
            // In the byte order of guest memory, like a table read in place.
            table.push(pair_of(bytes).map(u64::to_le));
        }
        Ok(NonNull::from(table.as_mut_slice()).cast())
    }
}
