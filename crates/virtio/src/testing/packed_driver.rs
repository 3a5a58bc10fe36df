//! The driver's side of a packed queue.

use super::driver::Buffer;
use super::memory::TestMemory;
use crate::blk_queue::QueueSetup;
use crate::packed::Position;
use crate::queue::layout::descriptors_len;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// Distance in bytes of the parts of a queue after the ring.
const EVENT_STRIDE: u64 = 64;

/// Wishes in an event suppression structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// After each batch of used descriptors.
    Always,
    /// Never; the driver polls.
    Never,
    /// When the descriptor at this position is used.
    At(Position),
}

/// A driver with its ring in guest memory. Chains become visible when they are offered, as Linux
/// does it.
pub struct PackedDriver {
    memory: TestMemory,
    size: u16,
    ring: u64,
    event_idx: bool,
    next_avail: Position,
    next_used: Position,
    /// Number of descriptors of each buffer that the device has.
    counts: Vec<u16>,
    /// Number of descriptors offered since the last `publish`.
    added: u16,
}

impl PackedDriver {
    /// Creates a queue at `gpa`, in zeroed memory.
    pub fn new(memory: &TestMemory, gpa: u64, size: u16, event_idx: bool) -> PackedDriver {
        let start = Position {
            index: 0,
            wrap: true,
        };
        PackedDriver {
            memory: memory.clone(),
            size,
            ring: gpa,
            event_idx,
            next_avail: start,
            next_used: start,
            counts: vec![0; usize::from(size)],
            added: 0,
        }
    }

    /// Returns the bytes that a queue of `size` entries occupies.
    pub fn ring_bytes(size: u16) -> u64 {
        descriptors_len(size).next_multiple_of(EVENT_STRIDE) + 2 * EVENT_STRIDE
    }

    /// Starts at another position, like a ring that has been used for long.
    pub fn start_at(&mut self, position: Position) {
        (self.next_avail, self.next_used) = (position, position);
        for index in 0..self.size {
            // All descriptors are used: those before the position in this lap.
            let lap = position.wrap == (index < position.index);
            let flags = if lap { AVAIL | USED } else { 0 };
            self.write(index, 0, 0, 0, flags);
        }
    }

    /// Returns the configuration that a front-end would send for this queue, with new eventfds.
    pub fn setup(&self, features: u64) -> QueueSetup {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = || -> OwnedFd { event().expect("an eventfd") };
        QueueSetup {
            index: 0,
            size: self.size,
            desc_addr: self.ring + TestMemory::USER_OFFSET,
            avail_addr: self.driver_event() + TestMemory::USER_OFFSET,
            used_addr: self.device_event() + TestMemory::USER_OFFSET,
            log_addr: Some(self.device_event()),
            base: Position::base(self.next_used, self.next_used),
            features,
            kick: event(),
            call: Some(event()),
            err: Some(event()),
        }
    }

    /// Returns the guest physical address of the descriptor ring.
    pub fn ring_gpa(&self) -> u64 {
        self.ring
    }

    /// Returns the guest physical address of the driver's event suppression structure.
    pub fn driver_event(&self) -> u64 {
        self.ring + descriptors_len(self.size).next_multiple_of(EVENT_STRIDE)
    }

    /// Returns the guest physical address of the device's event suppression structure.
    pub fn device_event(&self) -> u64 {
        self.driver_event() + EVENT_STRIDE
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the position of the next descriptor to be offered.
    pub fn next_avail(&self) -> Position {
        self.next_avail
    }

    /// Returns the position of the next used descriptor.
    pub fn next_used(&self) -> Position {
        self.next_used
    }

    /// Returns the number of free descriptors.
    pub fn room(&self) -> u16 {
        self.size.saturating_sub(self.counts.iter().sum())
    }

    /// Returns whether the device has this buffer.
    pub fn has(&self, id: u16) -> bool {
        self.counts[usize::from(id)] > 0
    }

    /// Writes one descriptor of the ring or, at `table`, of an indirect table.
    pub fn put(&self, table: u64, index: u16, buffer: Buffer, id: u16, flags: u16) {
        let at = self.memory.at(table + u64::from(index) * 16, 16);
        let rest = u64::from(buffer.len) | u64::from(id) << 32 | u64::from(flags) << 48;
        // SAFETY: 16 mapped bytes; tables may be unaligned.
        unsafe {
            at.cast::<u64>().write_unaligned(buffer.gpa.to_le());
            at.cast::<u64>().add(1).write_unaligned(rest.to_le());
        }
    }

    fn write(&self, index: u16, gpa: u64, len: u32, id: u16, flags: u16) {
        let at = self.memory.at(self.ring + u64::from(index) * 16, 16);
        let rest = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
        // SAFETY: 16 mapped bytes, aligned.
        unsafe { at.cast::<u64>().write_volatile(gpa.to_le()) };
        self.word(index).store(rest.to_le(), Ordering::Release);
    }

    /// Returns length, id and flags of a descriptor of the ring.
    fn word(&self, index: u16) -> &AtomicU64 {
        let at = self.memory.at(self.ring + u64::from(index) * 16 + 8, 8);
        // SAFETY: 8 mapped bytes, aligned; both sides access them atomically.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    /// Makes a direct chain available. The ring must have room, and the device must not have the
    /// buffer.
    pub fn offer(&mut self, id: u16, buffers: &[Buffer]) {
        let flags = |buffer: &Buffer, is_last: bool| {
            let write = if buffer.writable { WRITE } else { 0 };
            write | if is_last { 0 } else { NEXT }
        };
        let last = buffers.len() - 1;
        let descriptors: Vec<(Buffer, u16)> = buffers
            .iter()
            .enumerate()
            .map(|(i, buffer)| (*buffer, flags(buffer, i == last)))
            .collect();
        self.offer_descriptors(id, &descriptors);
    }

    /// Makes a chain in an indirect table available.
    pub fn offer_indirect(&mut self, id: u16, table: u64, buffers: &[Buffer]) {
        for (i, buffer) in buffers.iter().enumerate() {
            let flags = if buffer.writable { WRITE } else { 0 };
            self.put(table, i as u16, *buffer, 0, flags);
        }
        let reference = Buffer::readable(table, buffers.len() as u32 * 16);
        self.offer_descriptors(id, &[(reference, INDIRECT)]);
    }

    /// Makes descriptors with these flags available, the first one last.
    pub fn offer_descriptors(&mut self, id: u16, descriptors: &[(Buffer, u16)]) {
        let count = descriptors.len() as u16;
        let start = self.next_avail;
        for (i, (buffer, flags)) in descriptors.iter().enumerate().rev() {
            let at = start.after(i as u16, self.size);
            let owner = if at.wrap { AVAIL } else { USED };
            self.write(at.index, buffer.gpa, buffer.len, id, flags | owner);
        }
        self.next_avail = start.after(count, self.size);
        if let Some(in_ring) = self.counts.get_mut(usize::from(id)) {
            *in_ring = count;
        }
        self.added += count;
    }

    /// Returns true if the device wants a kick for what was offered since the last call.
    pub fn publish(&mut self) -> bool {
        fence(Ordering::SeqCst);
        let added = std::mem::take(&mut self.added);
        let position = self.memory.read_u16(self.device_event());
        match self.memory.read_u16(self.device_event() + 2) & 3 {
            1 => false,
            2 if self.event_idx => {
                let wanted = Position::of_word(position);
                (1..=added.min(self.size)).any(|back| {
                    let index = self.next_avail.before(back, self.size);
                    let wrap = self.next_avail.wrap == (index < self.next_avail.index);
                    wanted == Position { index, wrap }
                })
            }
            _ => added > 0,
        }
    }

    /// Returns id and length of the next used element.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        let at = self.next_used;
        let word = u64::from_le(self.word(at.index).load(Ordering::Acquire));
        let flags = (word >> 48) as u16 & (AVAIL | USED);
        if flags != if at.wrap { AVAIL | USED } else { 0 } {
            return None;
        }
        let id = (word >> 32) as u16;
        let count = self.counts.get_mut(usize::from(id)).map(std::mem::take);
        let count = count.filter(|count| *count > 0);
        let count = count.unwrap_or_else(|| panic!("buffer {id} is not in the ring"));
        self.next_used = at.after(count, self.size);
        Some((id, word as u32))
    }

    /// Takes back used buffers, and ignores what makes no sense.
    pub(super) fn forget_used(&mut self) {
        loop {
            let at = self.next_used;
            let word = u64::from_le(self.word(at.index).load(Ordering::Acquire));
            let flags = (word >> 48) as u16 & (AVAIL | USED);
            let is_used = flags == if at.wrap { AVAIL | USED } else { 0 };
            let id = usize::from((word >> 32) as u16);
            match self.counts.get_mut(id) {
                Some(count) if is_used && *count > 0 => {
                    self.next_used = at.after(std::mem::take(count), self.size);
                }
                _ => return,
            }
        }
    }

    /// Sets the driver's event suppression structure.
    pub fn wish(&self, wish: Wish) {
        let (position, flags) = match wish {
            Wish::Always => (0, 0),
            Wish::Never => (0, 1),
            Wish::At(position) => (position.word(), 2),
        };
        self.memory.write_u16(self.driver_event(), position);
        self.memory.write_u16(self.driver_event() + 2, flags);
    }

    /// Continues with a ring that is in memory already: chains from `start` on were offered, of
    /// these numbers of descriptors by id, and none was taken back.
    pub fn resume_at(&mut self, start: Position, end: Position, counts: &[(u16, u16)]) {
        (self.next_used, self.next_avail) = (start, end);
        self.counts.fill(0);
        for (id, count) in counts {
            self.counts[usize::from(*id)] = *count;
        }
    }
}
