//! The area that tracks requests in flight. The front-end keeps the area if this process dies, and
//! passes it to the next back-end.

use super::{Fault, Reply, Session};
use crate::vhost_user::codec::Inflight;
use crate::vhost_user::mapping::Mapping;
use fathom_core::{SAVED_STATE_ROOM, SavedState};
use fathom_units::cause;
use fathom_virtio::inflight::{self, InflightQueue};
use fathom_virtio::packed_inflight::{self, PackedInflight};
use fathom_virtio::queue::MAX_SIZE;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// The mapped area: one region per queue, in order.
pub struct InflightArea {
    pub(super) mapping: Arc<Mapping>,
    pub(super) queues: u16,
    pub(super) queue_size: u16,
    /// The regions are those of packed queues.
    packed: bool,
    /// Memory for the disk, after the queues' regions.
    saved_state: Option<SavedState>,
    /// Offset in bytes of the regions for queues of any size, after the disk's memory.
    roomy: Option<usize>,
}

impl InflightArea {
    /// Returns the region of vring `index`, which has `size` entries.
    fn queue(&self, index: u16, size: u16) -> Option<Region> {
        if index >= self.queues {
            return None;
        }
        let (start, entries) = match self.roomy {
            Some(roomy) if size > self.queue_size => (roomy, MAX_SIZE),
            _ => (0, self.queue_size),
        };
        let offset = start + usize::from(index) * region_size(entries, self.packed);
        Some(Region {
            // SAFETY: the mapping was checked to hold `queues` regions of this size.
            base: unsafe { self.mapping.ptr().add(offset) },
            entries,
            mapping: self.mapping.clone(),
        })
    }
}

/// The region of one queue.
pub struct Region {
    base: NonNull<u8>,
    entries: u16,
    mapping: Arc<Mapping>,
}

impl Region {
    pub fn split(self) -> InflightQueue {
        // SAFETY: the mapping holds this region from an 8-aligned start, and the queue keeps a
        // reference to it. Only this queue accesses this part, since a vring runs only once.
        unsafe { InflightQueue::new(self.base, self.entries, self.mapping) }
    }

    /// The same for a packed queue, in an area of packed queues.
    pub fn packed(self) -> PackedInflight {
        // SAFETY: as in `split`; the regions of such an area have the size of packed ones.
        unsafe { PackedInflight::new(self.base, self.entries, self.mapping) }
    }
}

/// Returns the size of a queue's region in bytes.
fn region_size(queue_size: u16, packed: bool) -> usize {
    match packed {
        true => packed_inflight::region_size(queue_size),
        false => inflight::region_size(queue_size),
    }
}

/// Returns the size of all queues' regions in bytes.
fn regions_size(queues: u16, queue_size: u16, packed: bool) -> u64 {
    region_size(queue_size, packed) as u64 * u64::from(queues)
}

/// Layout of the area, as offsets in bytes; the queues' regions come first.
struct Layout {
    /// Size of all regions.
    regions: u64,
    /// Range of the disk's memory.
    saved_state: Range<u64>,
    /// Range of the regions for queues of any size.
    ///
    /// A front-end announces the queue size that its device offers, but QEMU lets a driver choose a
    /// larger one: SeaBIOS 1.16.3 uses 256 entries of a device with 128. These regions come last,
    /// so that programs that do not know them find the other parts.
    roomy: Range<u64>,
}

impl Layout {
    fn new(queues: u16, queue_size: u16, room: u64, packed: bool) -> Layout {
        let regions = regions_size(queues, queue_size, packed);
        let start = regions.next_multiple_of(8);
        let saved_state = start..start + room;
        let start = saved_state.end.next_multiple_of(8);
        Layout {
            regions,
            saved_state,
            roomy: start..start + regions_size(queues, MAX_SIZE, packed),
        }
    }

    /// Returns the layout for any disk, since another disk may take this one's place.
    fn of_all(queues: u16, queue_size: u16, packed: bool) -> Layout {
        Layout::new(queues, queue_size, SAVED_STATE_ROOM, packed)
    }

    /// Returns the layout of an existing area. An earlier version left only as much room as its own
    /// disk needed, which was none for a disk without tables.
    fn found(area: &Inflight, wanted: u64, packed: bool) -> Layout {
        let of = |room| Layout::new(area.num_queues, area.queue_size, room, packed);
        let (all, none) = (of(SAVED_STATE_ROOM), of(0));
        if area.mmap_size >= all.roomy.end {
            all
        } else if area.mmap_size == none.roomy.end {
            none
        } else {
            of(wanted)
        }
    }
}

fn memory_file(size: u64) -> Result<OwnedFd, rustix::io::Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("fathom-inflight", flags)?;
    ftruncate(&fd, size)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

impl Session<'_> {
    fn check_inflight(&self, wanted: &Inflight) -> Result<(), Fault> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        if queues == 0 || usize::from(queues) > self.vrings.len() {
            return Err(Fault::Refused(format!(
                "{queues} queues exceed the disk's limit of {}",
                self.vrings.len()
            )));
        }
        if !(1..=MAX_SIZE).contains(&size) {
            return Err(Fault::Refused(format!(
                "queues of {size} entries are not supported, only 1 to {MAX_SIZE}"
            )));
        }
        Ok(())
    }

    pub(super) fn get_inflight_fd(&mut self, wanted: Inflight) -> Result<Reply, Fault> {
        self.check_inflight(&wanted)?;
        // Front-ends send the features before they ask for an area.
        let packed = self.features.packed();
        let size = Layout::of_all(wanted.num_queues, wanted.queue_size, packed)
            .roomy
            .end;
        let fd = memory_file(size)
            .map_err(|e| Fault::Refused(format!("cannot create a memory file: {}", cause(e))))?;
        let area = Inflight {
            mmap_size: size,
            mmap_offset: 0,
            ..wanted
        };
        Ok(Reply::Payload(area.to_bytes(), Some(fd)))
    }

    pub(super) fn set_inflight_fd(&mut self, area: Inflight, fd: OwnedFd) -> Result<Reply, Fault> {
        self.check_inflight(&area)?;
        let wanted = self.shared.disk.saved_state_len();
        let packed = self.features.packed();
        let Layout {
            regions,
            saved_state,
            roomy,
        } = Layout::found(&area, wanted, packed);
        if area.mmap_size < regions {
            return Err(Fault::Refused(format!(
                "the area has {} bytes but needs {regions}",
                area.mmap_size
            )));
        }
        if !area.mmap_offset.is_multiple_of(8) {
            return Err(Fault::refused("the area's offset is not a multiple of 8"));
        }
        // An area created by another program may lack room for the disk, or for larger queues.
        let fits = |end: u64| area.mmap_size >= end;
        let room = saved_state.end - saved_state.start;
        let has_saved_state = wanted > 0 && wanted <= room && fits(saved_state.end);
        let is_roomy = fits(roomy.end);
        let len = match (is_roomy, has_saved_state) {
            (true, _) => roomy.end,
            (false, true) => saved_state.end,
            (false, false) => regions,
        };
        let mapping = self
            .map(fd, area.mmap_offset, len)
            .map_err(|e| Fault::Refused(format!("in-flight area: {e}")))?;
        let mapping = Arc::new(mapping);
        let saved_state = has_saved_state.then(|| {
            let words = wanted as usize / 8;
            // SAFETY: the mapping starts at a multiple of 8 and contains this range, which no queue
            // uses.
            unsafe {
                let base = mapping.ptr().add(saved_state.start as usize);
                SavedState::new(base, words, mapping.clone())
            }
        });
        self.shared
            .update_status(|status| status.keeps_nothing = wanted > 0 && !has_saved_state);
        self.while_paused(|session| {
            // The disk's memory may change only between activations.
            session.deactivate();
            session.inflight = Some(InflightArea {
                mapping,
                queues: area.num_queues,
                queue_size: area.queue_size,
                packed,
                saved_state,
                roomy: is_roomy.then_some(roomy.start as usize),
            });
        })
        .map_err(Fault::into_fatal)?;
        Ok(Reply::Ack)
    }

    /// Returns the disk's memory in the in-flight area, if the front-end has one.
    pub(super) fn saved_state(&self) -> Option<SavedState> {
        self.inflight.as_ref()?.saved_state.clone()
    }

    /// Returns the region for a queue of `size` entries that is about to start, if the front-end
    /// has an in-flight area.
    pub(super) fn current_inflight(&self, index: u16, size: u16) -> Result<Option<Region>, String> {
        let Some(area) = &self.inflight else {
            return Ok(None);
        };
        if area.packed != self.features.packed() {
            let kind = |packed| if packed { "packed" } else { "split" };
            return Err(format!(
                "the in-flight area is one of {} queues, but the driver uses {} ones; the \
                 front-end must request another area after a reset",
                kind(area.packed),
                kind(!area.packed)
            ));
        }
        let outside = || {
            format!(
                "the in-flight area has room for only {} queues",
                area.queues
            )
        };
        area.queue(index, size).ok_or_else(outside).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(mmap_size: u64, queues: u16, wanted: u64, packed: bool) -> (Range<u64>, Range<u64>) {
        let area = Inflight {
            mmap_size,
            mmap_offset: 0,
            num_queues: queues,
            queue_size: 128,
            wire_len: 0,
        };
        let layout = Layout::found(&area, wanted, packed);
        (layout.saved_state, layout.roomy)
    }

    #[test]
    fn an_area_is_used_as_it_was_laid_out() {
        let queues = [1, 2, 64, 256];
        for (queues, packed) in queues.into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let found = |size, queues, wanted| found(size, queues, wanted, packed);
            let regions = regions_size(queues, 128, packed);
            let roomy = regions_size(queues, MAX_SIZE, packed);
            let begin = regions.next_multiple_of(8);
            let all = (
                begin..begin + SAVED_STATE_ROOM,
                begin + SAVED_STATE_ROOM..begin + SAVED_STATE_ROOM + roomy,
            );
            // The layout does not depend on what the disk needs.
            let size = all.1.end;
            assert_eq!(found(size, queues, 0), all);
            assert_eq!(found(size, queues, SAVED_STATE_ROOM), all);
            // An area of an earlier version, for a disk that needed no memory.
            let none = (begin..begin, begin..begin + roomy);
            assert_eq!(found(begin + roomy, queues, 0), none);
            assert_eq!(found(begin + roomy, queues, SAVED_STATE_ROOM), none);
            // Areas of other programs may have any size.
            assert_eq!(
                found(begin + SAVED_STATE_ROOM, queues, SAVED_STATE_ROOM).0,
                all.0
            );
            assert_eq!(found(regions, queues, 0).0, begin..begin);
        }
    }
}
