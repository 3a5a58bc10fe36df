//! The guest's memory regions.

use super::{Fault, Reply, Session};
use crate::vhost_user::codec::Region;
use crate::vhost_user::mapping::{MapError, Mapping};
use fathom_virtio::{GuestMemory, GuestRegion};
use std::os::fd::OwnedFd;
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct MappedRegion {
    pub(super) region: Region,
    pub(super) mapping: Arc<Mapping>,
}

/// All regions, and the address translation for queues made from them. A change replaces the whole
/// table.
#[derive(Default)]
pub struct MemoryTable {
    pub(super) regions: Vec<MappedRegion>,
    memory: Option<Arc<GuestMemory>>,
}

impl MemoryTable {
    /// Creates a table of at most `slots` regions.
    fn new(regions: Vec<MappedRegion>, slots: usize) -> Result<MemoryTable, Fault> {
        if regions.len() > slots {
            return Err(Fault::Refused(format!("more than {slots} memory regions")));
        }
        let guest_regions = regions
            .iter()
            .map(|MappedRegion { region, mapping }| GuestRegion {
                gpa: region.guest_addr,
                len: region.size,
                user_addr: region.user_addr,
                host: mapping.ptr(),
                owner: mapping.clone(),
            })
            .collect();
        // SAFETY: a `Mapping` is readable and writable, has the length of its region, and is
        // unmapped only by its drop. No code makes references into it, and truncation is handled.
        let memory = unsafe { GuestMemory::new(guest_regions) }.map_err(Fault::refused)?;
        let memory = (!regions.is_empty()).then(|| Arc::new(memory));
        Ok(MemoryTable { regions, memory })
    }

    /// Returns the address translation; None if there are no regions.
    pub fn memory(&self) -> Option<&Arc<GuestMemory>> {
        self.memory.as_ref()
    }

    /// Returns the guest address after the last region.
    pub fn end(&self) -> u64 {
        let ends = self.regions.iter().map(|r| r.region);
        ends.map(|r| r.guest_addr.saturating_add(r.size))
            .max()
            .unwrap_or(0)
    }
}

impl Session<'_> {
    /// Maps a range of a file that the front-end shares.
    pub(super) fn map(&self, fd: OwnedFd, offset: u64, len: u64) -> Result<Mapping, MapError> {
        Mapping::new(fd, offset, len, self.alarm.clone(), &self.shared.share)
    }

    fn map_region(&self, region: Region, fd: OwnedFd) -> Result<MappedRegion, Fault> {
        let mapping = self
            .map(fd, region.mmap_offset, region.size)
            .map_err(|e| Fault::Refused(format!("region at {:#x}: {e}", region.guest_addr)))?;
        Ok(MappedRegion {
            region,
            mapping: Arc::new(mapping),
        })
    }

    pub(super) fn set_mem_table(
        &mut self,
        regions: Vec<(Region, OwnedFd)>,
    ) -> Result<Reply, Fault> {
        let regions = regions
            .into_iter()
            .map(|(region, fd)| self.map_region(region, fd))
            .collect::<Result<Vec<_>, Fault>>()?;
        self.replace_memory(regions)
    }

    pub(super) fn add_mem_reg(&mut self, region: Region, fd: OwnedFd) -> Result<Reply, Fault> {
        let added = self.map_region(region, fd)?;
        let mut regions = self.memory.regions.clone();
        regions.push(added);
        self.replace_memory(regions)
    }

    pub(super) fn rem_mem_reg(&mut self, region: Region) -> Result<Reply, Fault> {
        let same = |r: &Region| {
            (r.guest_addr, r.size, r.user_addr)
                == (region.guest_addr, region.size, region.user_addr)
        };
        let mut regions = self.memory.regions.clone();
        let Some(found) = regions.iter().position(|r| same(&r.region)) else {
            return Err(Fault::Refused(format!(
                "no region at {:#x} of {:#x} bytes",
                region.guest_addr, region.size
            )));
        };
        regions.remove(found);
        self.replace_memory(regions)
    }

    /// Replaces the memory regions after draining the queues, since requests in flight refer to the
    /// old regions.
    ///
    /// A queue whose rings are not in the new table waits for a table that contains them: a
    /// front-end grows a region by removing and adding it.
    fn replace_memory(&mut self, regions: Vec<MappedRegion>) -> Result<Reply, Fault> {
        let table = MemoryTable::new(regions, self.shared.share.slots())?;
        let resumed = self.while_paused(|session| {
            session.alarm.set_memory(table.memory().cloned());
            session.memory = table;
        });
        match resumed {
            Err(Fault::Refused(problem)) => tracing::info!("vhost-user: waiting: {problem}"),
            outcome => outcome?,
        }
        Ok(Reply::Ack)
    }
}
