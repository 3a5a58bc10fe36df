//! The driver's side of a queue.

use super::TestMemory;
use crate::blk_queue::QueueSetup;
use crate::queue::layout::{IDX, RING, avail_len, descriptors_len, used_len};
use crate::ring::need_event;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, Ordering, fence};

/// Descriptor flag VIRTQ_DESC_F_NEXT: the chain continues at the descriptor's `next` field.
pub const NEXT: u16 = 1;
/// Descriptor flag VIRTQ_DESC_F_WRITE: the device writes to the buffer.
pub const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Guest physical address of the buffer.
    pub gpa: u64,
    /// Length of the buffer in bytes.
    pub len: u32,
    /// The device writes to the buffer.
    pub writable: bool,
}

impl Buffer {
    /// Creates a buffer of `len` bytes at `gpa` that the device reads.
    pub fn readable(gpa: u64, len: u32) -> Buffer {
        Buffer {
            gpa,
            len,
            writable: false,
        }
    }

    /// Creates a buffer of `len` bytes at `gpa` that the device writes to.
    pub fn writable(gpa: u64, len: u32) -> Buffer {
        Buffer {
            gpa,
            len,
            writable: true,
        }
    }
}

/// A driver with its rings in guest memory.
pub struct Driver {
    memory: TestMemory,
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    event_idx: bool,
    next_avail: u16,
    published: u16,
    next_used: u16,
}

impl Driver {
    /// Creates a queue with all its rings at `gpa`, in zeroed memory.
    pub fn new(memory: &TestMemory, gpa: u64, size: u16, event_idx: bool) -> Driver {
        let avail = gpa + descriptors_len(size);
        Driver {
            memory: memory.clone(),
            size,
            desc: gpa,
            avail,
            used: (avail + avail_len(size)).next_multiple_of(64),
            event_idx,
            next_avail: 0,
            published: 0,
            next_used: 0,
        }
    }

    /// Returns the bytes that the rings of a queue of `size` entries occupy.
    pub fn ring_bytes(size: u16) -> u64 {
        descriptors_len(size) + avail_len(size) + used_len(size) + 64
    }

    /// Returns the number of entries of the queue.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Starts with both indices at `index`, like a ring that has been used for long.
    pub fn start_at(&mut self, index: u16) {
        self.next_avail = index;
        self.published = index;
        self.next_used = index;
        self.memory.write_u16(self.avail + IDX as u64, index);
        self.memory.write_u16(self.used + IDX as u64, index);
    }

    /// Continues with rings that are in memory already, as if no used element from `index` on had
    /// been read.
    pub fn resume_at(&mut self, index: u16) {
        self.next_avail = self.memory.read_u16(self.avail + IDX as u64);
        self.published = self.next_avail;
        self.next_used = index;
    }

    /// Returns the configuration that a front-end would send for this queue, with new eventfds.
    pub fn setup(&self, features: u64) -> QueueSetup {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = || -> OwnedFd { event().expect("an eventfd") };
        QueueSetup {
            index: 0,
            size: self.size,
            desc_addr: self.desc + TestMemory::USER_OFFSET,
            avail_addr: self.avail + TestMemory::USER_OFFSET,
            used_addr: self.used + TestMemory::USER_OFFSET,
            log_addr: Some(self.used),
            base: self.used_idx().into(),
            features,
            kick: event(),
            call: Some(event()),
            err: Some(event()),
        }
    }

    /// Returns the guest physical address of the descriptor table.
    pub fn desc_gpa(&self) -> u64 {
        self.desc
    }

    /// Returns the guest physical address of the avail ring.
    pub fn avail_gpa(&self) -> u64 {
        self.avail
    }

    /// Returns the guest physical address of the used ring.
    pub fn used_gpa(&self) -> u64 {
        self.used
    }

    /// Writes one descriptor of the table at `table`.
    #[inline]
    pub fn put(&self, table: u64, index: u16, buffer: Buffer, flags: u16, next: u16) {
        let at = self
            .memory
            .at(table + u64::from(index) * 16, 16)
            .cast::<u64>();
        let low = u64::from(buffer.len) | u64::from(flags) << 32 | u64::from(next) << 48;
        // SAFETY: 16 mapped bytes.
        unsafe {
            at.write_unaligned(buffer.gpa.to_le());
            at.add(1).write_unaligned(low.to_le());
        }
    }

    /// Writes a chain to consecutive descriptors of `table`, beginning at `first`.
    #[inline]
    pub fn put_chain(&self, table: u64, first: u16, buffers: &[Buffer]) {
        for (i, buffer) in buffers.iter().enumerate() {
            let index = first + i as u16;
            let last = i + 1 == buffers.len();
            let write = if buffer.writable { WRITE } else { 0 };
            let flags = write | if last { 0 } else { NEXT };
            self.put(
                table,
                index,
                *buffer,
                flags,
                if last { 0 } else { index + 1 },
            );
        }
    }

    /// Writes a chain to the queue's own table.
    pub fn put_direct(&self, head: u16, buffers: &[Buffer]) {
        self.put_chain(self.desc, head, buffers);
    }

    /// Writes a chain to an indirect table that `head` refers to.
    #[inline]
    pub fn put_indirect(&self, head: u16, table: u64, buffers: &[Buffer]) {
        self.put_chain(table, 0, buffers);
        let reference = Buffer::readable(table, buffers.len() as u32 * 16);
        self.put(self.desc, head, reference, INDIRECT, 0);
    }

    /// Adds a head to the avail ring. The device sees it after `publish`.
    #[inline]
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.next_avail & (self.size - 1));
        let at = self.avail + RING as u64 + slot * 2;
        self.shared(at).store(head.to_le(), Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Returns the number of heads offered since avail index `index`.
    pub fn ahead_of(&self, index: u16) -> u16 {
        self.next_avail.wrapping_sub(index)
    }

    /// Makes the offered heads visible to the device. Returns true if the device wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_avail);
        self.published = new;
        let idx = self.shared(self.avail + IDX as u64);
        idx.store(new.to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        if self.event_idx {
            old != new && need_event(self.avail_event(), new, old)
        } else {
            let flags = self.shared(self.used).load(Ordering::Relaxed);
            old != new && flags & 1 == 0
        }
    }

    /// Sets the avail index to an arbitrary value.
    pub fn force_avail_idx(&self, index: u16) {
        self.memory.write_u16(self.avail + IDX as u64, index);
    }

    /// Returns head and length of the next used element.
    #[inline]
    pub fn take_used(&mut self) -> Option<(u32, u32)> {
        if self.used_idx() == self.next_used {
            return None;
        }
        let slot = u64::from(self.next_used & (self.size - 1));
        let at = self.memory.at(self.used + RING as u64 + slot * 8, 8);
        // SAFETY: 8 mapped bytes; the device no longer writes them.
        let element = u64::from_le(unsafe { at.cast::<u64>().read_unaligned() });
        self.next_used = self.next_used.wrapping_add(1);
        Some((element as u32, (element >> 32) as u32))
    }

    /// Returns the used index that the device has written.
    #[inline]
    pub fn used_idx(&self) -> u16 {
        u16::from_le(self.shared(self.used + IDX as u64).load(Ordering::Acquire))
    }

    /// Returns the driver's position in the used ring.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Requests an interrupt when the used index passes `index`.
    pub fn set_used_event(&self, index: u16) {
        let at = self.avail + avail_len(self.size) - 2;
        self.shared(at).store(index.to_le(), Ordering::Relaxed);
    }

    /// Enables or disables all interrupts, for a queue without EVENT_IDX.
    pub fn set_interrupts(&self, wanted: bool) {
        self.memory.write_u16(self.avail, u16::from(!wanted));
    }

    /// Returns the avail index after which the device wants a kick, for a queue with EVENT_IDX.
    pub fn avail_event(&self) -> u16 {
        let at = self.used + used_len(self.size) - 2;
        u16::from_le(self.shared(at).load(Ordering::Relaxed))
    }

    /// Returns whether the device wants kicks, for a queue without EVENT_IDX.
    pub fn kicks_wanted(&self) -> bool {
        self.memory.read_u16(self.used) & 1 == 0
    }

    #[inline]
    fn shared(&self, gpa: u64) -> &AtomicU16 {
        // SAFETY: two mapped bytes, even; both sides access them atomically.
        unsafe { AtomicU16::from_ptr(self.memory.at(gpa, 2).cast()) }
    }
}

/// Returns and resets the counter of an eventfd. None if it was not signalled.
pub fn signalled(event: &OwnedFd) -> Option<u64> {
    let mut counter = [0; 8];
    let read = rustix::io::read(event, &mut counter);
    read.ok().map(|_| u64::from_ne_bytes(counter))
}
