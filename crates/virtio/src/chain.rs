//! Walking a descriptor chain (2.7.5), direct or indirect.

use crate::memory::{GuestMemory, RegionCache, read_bytes};
use crate::queue::SplitQueue;
use crate::queue::layout::DESCRIPTOR_SIZE;
use std::ptr::NonNull;

const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;
const F_INDIRECT: u16 = 4;

/// The largest indirect table that we look at. Drivers make them no larger
/// than `seg_max` plus header and status.
pub(crate) const MAX_INDIRECT: u32 = 1024;

/// A private copy of a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub addr: u64,
    pub len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    #[inline(always)]
    pub fn from_bytes(bytes: [u8; 16]) -> Descriptor {
        let bits = u128::from_le_bytes(bytes);
        Descriptor {
            addr: bits as u64,
            len: (bits >> 64) as u32,
            flags: (bits >> 96) as u16,
            next: (bits >> 112) as u16,
        }
    }

    /// Whether the device writes to it.
    #[inline(always)]
    pub fn is_writable(&self) -> bool {
        self.flags & F_WRITE != 0
    }
}

/// The chain does not hold together, so its end (and status byte) is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unusable;

/// Where the descriptors come from.
enum Table {
    Queue,
    /// `host` is None when the table spans regions.
    Indirect {
        gpa: u64,
        host: Option<NonNull<u8>>,
    },
}

/// One chain's descriptors, in order, each copied once.
pub(crate) struct Chain<'a> {
    queue: &'a SplitQueue,
    memory: &'a GuestMemory,
    indirect: bool,
    table: Table,
    /// Entries of the table.
    entries: u32,
    /// Descriptors that may still come; a chain with more has a loop.
    left: u32,
    next: Option<u32>,
}

impl<'a> Chain<'a> {
    /// `indirect`: the driver may use indirect descriptors.
    #[inline(always)]
    pub fn new(queue: &'a SplitQueue, memory: &'a GuestMemory, head: u16, indirect: bool) -> Self {
        let entries = u32::from(queue.size());
        Chain {
            queue,
            memory,
            indirect,
            table: Table::Queue,
            entries,
            left: entries,
            next: Some(u32::from(head)),
        }
    }

    /// The next descriptor, or None after the last.
    #[inline(always)]
    pub fn next(&mut self, cache: &mut RegionCache) -> Result<Option<Descriptor>, Unusable> {
        let Some(index) = self.next else {
            return Ok(None);
        };
        let mut descriptor = self.read(index, cache)?;
        if descriptor.flags & F_INDIRECT != 0 {
            self.enter(descriptor, cache)?;
            descriptor = self.read(0, cache)?;
            if descriptor.flags & F_INDIRECT != 0 {
                return Err(Unusable);
            }
        }
        self.left = self.left.checked_sub(1).ok_or(Unusable)?;
        self.next = (descriptor.flags & F_NEXT != 0).then_some(u32::from(descriptor.next));
        Ok(Some(descriptor))
    }

    #[inline(always)]
    fn read(&self, index: u32, cache: &mut RegionCache) -> Result<Descriptor, Unusable> {
        match self.table {
            Table::Queue => self.queue.descriptor(index as u16).ok_or(Unusable),
            _ if index >= self.entries => Err(Unusable),
            Table::Indirect {
                host: Some(host), ..
            } => {
                // SAFETY: the whole table was translated, and `index` lies in it.
                let bytes = unsafe { read_bytes(host.add(index as usize * 16)) };
                Ok(Descriptor::from_bytes(bytes))
            }
            Table::Indirect { gpa, host: None } => {
                let at = gpa + u64::from(index) * DESCRIPTOR_SIZE;
                let bytes = cache.read(self.memory, at).ok_or(Unusable)?;
                Ok(Descriptor::from_bytes(bytes))
            }
        }
    }

    /// Go on in the table that `descriptor` refers to (2.7.5.3).
    #[inline(always)]
    fn enter(&mut self, descriptor: Descriptor, cache: &mut RegionCache) -> Result<(), Unusable> {
        let nested = matches!(self.table, Table::Indirect { .. });
        let (gpa, len) = (descriptor.addr, descriptor.len);
        let entries = len / DESCRIPTOR_SIZE as u32;
        if !self.indirect
            || nested
            || descriptor.flags & F_NEXT != 0
            || entries == 0
            || entries > MAX_INDIRECT
            || !u64::from(len).is_multiple_of(DESCRIPTOR_SIZE)
            || gpa.checked_add(u64::from(len)).is_none()
        {
            return Err(Unusable);
        }
        let host = cache.translate(self.memory, gpa, u64::from(len));
        self.table = Table::Indirect { gpa, host };
        self.entries = entries;
        self.left = entries;
        Ok(())
    }
}
