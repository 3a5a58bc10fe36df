//! The interface between a disk's queue and the layout of its ring: split (2.7) or packed (2.8).
//!
//! The layout is chosen once, when the queue starts. Each layout has its own compiled queue, so no
//! request pays for the choice.

use crate::descriptor::Descriptor;
use crate::dirty_log::DirtyLog;
use crate::inflight::InflightError;
use crate::memory::GuestMemory;
use std::ptr::NonNull;

/// Maximum queue size, in entries.
pub const MAX_SIZE: u16 = 1024;

/// Reason why a queue cannot run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RingError {
    /// The split queue has this number of entries, which is too large or not a power of two.
    #[error("queue size {0} is not a power of two from 1 to {MAX_SIZE}")]
    Size(u16),
    /// The packed queue has this number of entries, which is 0 or too large.
    #[error("queue size {0} is not from 1 to {MAX_SIZE}")]
    PackedSize(u16),
    /// A part of the queue is not aligned as virtio requires.
    #[error("the {ring} at {addr:#x} is not {alignment}-byte aligned")]
    Alignment {
        /// Name of the part, such as `descriptor table` or `used ring`.
        ring: &'static str,
        /// Address of the part in the front-end's address space.
        addr: u64,
        /// Required alignment in bytes.
        alignment: u64,
    },
    /// A part of the queue lies outside the guest's memory.
    #[error("the {ring} at {addr:#x} lies outside the guest's memory")]
    Outside {
        /// Name of the part, such as `descriptor table` or `used ring`.
        ring: &'static str,
        /// Address of the part in the front-end's address space.
        addr: u64,
    },
    /// The front-end starts the queue at a position that the queue does not have.
    #[error("position {base:#x} is not a position of a queue with {size} entries")]
    Base {
        /// Position as in SET_VRING_BASE.
        base: u32,
        /// Number of entries of the queue.
        size: u16,
    },
    /// The driver of a split queue claims more available heads than the queue has entries.
    #[error(
        "the driver's avail index jumped from {seen} to {avail}, past the queue's {size} entries"
    )]
    Jump {
        /// Avail index that the driver has written.
        avail: u16,
        /// Avail index of the next head to be popped.
        seen: u16,
        /// Number of entries of the queue.
        size: u16,
    },
    /// The driver of a split queue made a descriptor available that is not in the table.
    #[error("the driver made descriptor {head} available, of {size}")]
    Head {
        /// Index of the descriptor.
        head: u16,
        /// Number of entries of the descriptor table.
        size: u16,
    },
    /// The driver of a packed queue made a buffer available whose id is not less than the size.
    #[error("the driver made a buffer with id {id} available, of {size}")]
    Id {
        /// Id of the buffer.
        id: u16,
        /// Number of entries of the queue.
        size: u16,
    },
    /// The driver of a packed queue reused the id of a buffer that is not used yet.
    #[error("the driver made buffer {id} available, which the device still has")]
    Twice {
        /// Id of the buffer.
        id: u16,
    },
    /// The chains that the device has of a packed queue hold more descriptors than the ring.
    #[error("the driver made more descriptors available than the queue's {size} entries")]
    Overrun {
        /// Number of entries of the queue.
        size: u16,
    },
}

/// Reason why a ring cannot start.
#[derive(Debug)]
pub enum StartError {
    /// The ring's size, addresses or position are wrong.
    Ring(RingError),
    /// The in-flight region does not fit the queue.
    Inflight(InflightError),
}

impl From<RingError> for StartError {
    fn from(error: RingError) -> StartError {
        StartError::Ring(error)
    }
}

impl From<InflightError> for StartError {
    fn from(error: InflightError) -> StartError {
        StartError::Inflight(error)
    }
}

/// Addresses of a queue's parts in the front-end's own address space.
#[derive(Clone, Copy, Debug)]
pub struct RingAddresses {
    /// The descriptor table, or the descriptor ring of a packed queue.
    pub desc: u64,
    /// The avail ring, or the driver event suppression structure of a packed queue.
    pub avail: u64,
    /// The used ring, or the device event suppression structure of a packed queue.
    pub used: u64,
}

/// Configuration of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingSetup {
    /// Addresses of the ring's parts.
    pub at: RingAddresses,
    /// Number of entries.
    pub size: u16,
    /// Position at which the ring starts, as in SET_VRING_BASE.
    pub base: u32,
    /// Whether the driver negotiated `VIRTIO_F_EVENT_IDX`.
    pub event_idx: bool,
}

/// A ring that has started.
pub struct Started<R: Ring> {
    /// The ring, at the position at which it continues.
    pub ring: R,
    /// Chains that a predecessor left in flight, in the order in which it took them.
    pub resubmit: Vec<R::Chain>,
    /// Another device has used the ring before.
    pub has_predecessor: bool,
}

/// A ring of one layout. The methods that `pop`, `finish` and `publish` of the queue call run for
/// each request or batch: they do not allocate, lock or call the kernel.
pub trait Ring: Send + Sized + 'static {
    /// The in-flight region.
    type Region: Send;
    /// A chain that was taken and not parsed yet.
    type Chain: Copy + Send;
    /// Whether descriptors in memory have the format of packed queues (2.8.13).
    const PACKED: bool;

    /// Starts a ring. A region that was in use before determines the position instead of
    /// `setup.base`.
    ///
    /// # Safety
    /// `memory` outlives the ring.
    unsafe fn start(
        memory: &GuestMemory,
        setup: &RingSetup,
        region: &mut Option<Self::Region>,
    ) -> Result<Started<Self>, StartError>;

    /// Returns the number of entries.
    fn size(&self) -> u16;

    /// Returns the position as in GET_VRING_BASE.
    fn base(&self) -> u32;

    /// Returns whether the driver has made any chains available.
    fn pending(&self) -> bool;

    /// Returns how many chains may be available at most.
    fn available(&self) -> Result<usize, RingError>;

    /// Takes the next chain, one of those that `available` has counted. None if there are fewer.
    fn take(&mut self, region: &mut Option<Self::Region>)
    -> Result<Option<Self::Chain>, RingError>;

    /// Returns the driver's number for the chain, for `push_used`.
    fn tag(chain: Self::Chain) -> u16;

    /// Returns a private copy of the chain's first descriptor.
    fn first_descriptor(&self, chain: Self::Chain) -> Descriptor;

    /// Returns the table of `size` descriptors in which direct chains continue. The descriptors
    /// have the format of split queues.
    fn table(&self) -> NonNull<u8>;

    /// Adds a used element with `len` bytes written. The driver sees it after `publish`.
    fn push_used(&mut self, tag: u16, len: u32, region: &mut Option<Self::Region>);

    /// Returns the number of entries of used elements that are not published yet.
    fn unpublished(&self) -> u16;

    /// Makes the used elements visible to the driver.
    fn publish(&mut self, region: &mut Option<Self::Region>);

    /// Returns whether the driver wants an interrupt for the elements published since the previous
    /// call.
    fn needs_call(&mut self) -> bool;

    /// Asks the driver to kick. Returns true if chains are available already, for which the driver
    /// may not kick.
    fn enable_kicks(&mut self) -> bool;

    /// Asks the driver not to kick. The driver may kick all the same.
    fn disable_kicks(&mut self);

    /// Number of bytes at the logged address that the ring writes.
    fn logged_len(size: u16) -> u64;

    /// Logs the last `new` entries that `publish` made visible. The front-end's address for the
    /// log is `addr`.
    fn log_used(&self, log: &DirtyLog, addr: u64, new: u16);

    /// Logs the fields that tell the driver whether to kick.
    fn log_kick_wishes(&self, log: &DirtyLog, addr: u64);

    /// Logs what `start` has written.
    fn log_start(&self, _log: &DirtyLog) {}
}

/// Finds a part of a ring and checks its alignment.
pub(crate) fn place(
    memory: &GuestMemory,
    ring: &'static str,
    addr: u64,
    len: u64,
    alignment: u64,
) -> Result<NonNull<u8>, RingError> {
    let outside = RingError::Outside { ring, addr };
    let host = memory.translate_user(addr, len).ok_or(outside)?;
    // The mapping here may be less aligned than the front-end's.
    let aligned = |addr: u64| addr.is_multiple_of(alignment);
    if !aligned(addr) || !aligned(host.as_ptr() as u64) {
        return Err(RingError::Alignment {
            ring,
            addr,
            alignment,
        });
    }
    Ok(host)
}

/// Returns whether an index that advances from `old` to `new` passes `event` (2.7.10).
#[inline(always)]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
