//! virtio-blk requests that are laid out once and reused.
//!
//! The header, descriptor table, status byte and data buffer of a slot have fixed addresses. A
//! typical request changes only the sector in the header, with one store to one cache line. A
//! request with another operation than the slot's last one rewrites the table.
//!
//! The header and the table share a cache line, which the driver writes and the device reads. The
//! status bytes of all slots are packed into separate lines, so that a batch of completions
//! transfers few lines.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::memory::{Buffer, GuestMemory, Layout, PAGE};
use crate::options::SECTOR;
use crate::port::Op;
use crate::ring::{Desc, DriverRing};

/// `struct virtio_blk_outhdr`.
const HEADER_LEN: usize = 16;
/// `struct virtio_blk_discard_write_zeroes`.
const RANGE_LEN: u32 = 16;
/// Status value that no device writes.
pub const STATUS_UNWRITTEN: u8 = 0xff;

/// Properties that all slots of a queue share.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub slots: u16,
    /// Size of a request's data in bytes.
    pub len: u32,
    /// Maximum size of a data descriptor in bytes.
    pub segment: u32,
    pub indirect: bool,
    /// The queue is packed, and so are indirect tables.
    pub packed: bool,
}

impl Shape {
    fn segments(&self) -> u16 {
        self.len.div_ceil(self.segment) as u16
    }

    /// Returns the number of descriptors of a chain: header, data and status.
    pub fn chain(&self) -> u16 {
        self.segments() + 2
    }

    fn table_len(&self) -> usize {
        if self.indirect {
            16 * usize::from(self.chain())
        } else {
            0
        }
    }
}

/// Offsets of the slots' parts in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct SlotLayout {
    shape: Shape,
    lines: usize,
    line_len: usize,
    status: usize,
    data: usize,
    data_stride: usize,
}

impl SlotLayout {
    /// Allocates the memory for `shape`. Data buffers occupy whole pages.
    pub fn new(layout: &mut Layout, shape: Shape) -> SlotLayout {
        let n = usize::from(shape.slots);
        let line_len = (HEADER_LEN + shape.table_len()).next_multiple_of(64);
        let data_stride = (shape.len as usize).next_multiple_of(PAGE);
        SlotLayout {
            shape,
            line_len,
            lines: layout.take(n * line_len, PAGE),
            status: layout.take(n, PAGE),
            data_stride,
            data: layout.take(n * data_stride, PAGE),
        }
    }

    fn header(&self, slot: u16) -> usize {
        self.lines + usize::from(slot) * self.line_len
    }

    /// Returns the number of slots.
    pub fn count(&self) -> u16 {
        self.shape.slots
    }

    /// Returns the offset of a slot's status byte.
    pub fn status(&self, slot: u16) -> usize {
        self.status + usize::from(slot)
    }

    /// Returns the offset of a slot's data.
    pub fn data(&self, slot: u16) -> usize {
        self.data + usize::from(slot) * self.data_stride
    }
}

/// The slots of one queue. The guest memory must outlive them.
#[derive(Debug)]
pub struct Slots {
    layout: SlotLayout,
    /// Operation for which each slot's table is prepared.
    ops: Vec<Op>,
    headers: *mut u8,
    status: *mut u8,
    data: *mut u8,
    /// Address of the ring's first descriptor, which is the head of slot 0.
    heads: *mut Desc,
    /// Address of the first descriptor of slot 0's chain.
    tables: *mut u8,
    /// Distance in bytes between the first descriptors of two adjacent slots.
    table_stride: usize,
}

// SAFETY: the pointers refer to shared memory without thread affinity, which is accessed
// atomically. Only one thread at a time uses the slots.
unsafe impl Send for Slots {}

impl Slots {
    /// Builds the ring's descriptors and all tables. The tables are prepared for reads.
    pub fn new(memory: &GuestMemory, layout: SlotLayout, ring: &impl DriverRing) -> Slots {
        let shape = layout.shape;
        let n = usize::from(shape.slots);
        let map = memory.map();
        let (tables, table_stride) = if shape.indirect {
            let at = map.at(layout.lines, n * layout.line_len);
            // SAFETY: the table follows the header inside the line.
            (unsafe { at.add(HEADER_LEN) }, layout.line_len)
        } else {
            let last = n * usize::from(shape.chain()) - 1;
            ring.descriptor(last as u16);
            (ring.descriptor(0).cast(), 16 * usize::from(shape.chain()))
        };
        let mut slots = Slots {
            ops: vec![Op::Read; n],
            headers: map.at(layout.lines, n * layout.line_len),
            status: map.at(layout.status, n),
            data: map.at(layout.data, n * layout.data_stride),
            layout,
            heads: ring
                .descriptor(shape.slots - 1)
                .wrapping_sub(usize::from(shape.slots - 1)),
            tables,
            table_stride,
        };
        for slot in 0..shape.slots {
            slots.build(slot, Op::Read);
        }
        slots
    }

    /// Makes the head descriptor of a slot refer to its table of `entries`. Without links, the
    /// length of a packed queue's table is that of the chain.
    fn refer_to_table(&self, slot: u16, entries: u16) {
        let shape = self.layout.shape;
        let entries = if shape.packed { entries } else { shape.chain() };
        let table = self.layout.header(slot) + HEADER_LEN;
        let desc = Desc {
            addr: GuestMemory::guest_address(table),
            len: 16 * u32::from(entries),
            flags: Desc::INDIRECT,
            next: 0,
        };
        // SAFETY: one of the ring's descriptors, of which it has at least one per slot.
        store(unsafe { self.heads.add(usize::from(slot)) }, desc);
    }

    /// Returns the head descriptor of a slot's chain.
    #[inline(always)]
    pub fn head(&self, slot: u16) -> u16 {
        if self.layout.shape.indirect {
            slot
        } else {
            slot * self.layout.shape.chain()
        }
    }

    /// Prepares the slot's chain for `op` at byte `offset`. The slot must not be in flight. The
    /// caller pushes [`Slots::head`] afterwards.
    #[inline(always)]
    pub fn prepare(&mut self, slot: u16, op: Op, offset: u64) {
        if self.ops[usize::from(slot)] != op {
            self.build(slot, op);
        }
        let sector = offset / u64::from(SECTOR);
        match op {
            Op::Read | Op::Write => self.set_sector(slot, sector),
            Op::Flush => self.set_sector(slot, 0),
            Op::Discard | Op::WriteZeroes => {
                self.set_sector(slot, 0);
                self.set_range(slot, sector);
            }
        }
    }

    #[inline(always)]
    fn header(&self, slot: u16) -> *mut u8 {
        debug_assert!(slot < self.layout.shape.slots);
        // SAFETY: `slot` is below the number of slots that `new` checked for.
        unsafe { self.headers.add(usize::from(slot) * self.layout.line_len) }
    }

    #[inline(always)]
    fn set_sector(&self, slot: u16, sector: u64) {
        // SAFETY: inside the header, aligned to 8, and only accessed atomically.
        let field = unsafe { AtomicU64::from_ptr(self.header(slot).add(8).cast()) };
        field.store(sector, Ordering::Relaxed);
    }

    /// Writes the payload of a discard or write-zeroes request: one range, without the unmap flag.
    fn set_range(&self, slot: u16, sector: u64) {
        let buffer = self.buffer(slot);
        buffer.store(0, sector);
        buffer.store(1, u64::from(self.layout.shape.len / SECTOR));
    }

    /// Rewrites the request type and the descriptor table for another operation.
    fn build(&mut self, slot: u16, op: Op) {
        self.ops[usize::from(slot)] = op;
        // SAFETY: inside the header, aligned to 4, and only accessed atomically.
        let kind = unsafe { AtomicU32::from_ptr(self.header(slot).cast()) };
        kind.store(wire_type(op), Ordering::Relaxed);
        let shape = self.layout.shape;
        let base = if shape.indirect { 0 } else { self.head(slot) };
        let segments = shape.segments();
        let (data, first_len, device_writes) = match op {
            Op::Read => (segments, shape.segment, true),
            Op::Write => (segments, shape.segment, false),
            Op::Flush => (0, 0, false),
            Op::Discard | Op::WriteZeroes => (1, RANGE_LEN, false),
        };
        self.set_descriptor(slot, 0, self.layout.header(slot), 16, Desc::NEXT, base + 1);
        for i in 0..data {
            let start = u32::from(i) * shape.segment;
            let len = first_len.min(shape.len - start);
            let flags = Desc::NEXT | if device_writes { Desc::WRITE } else { 0 };
            let at = self.layout.data(slot) + start as usize;
            self.set_descriptor(slot, 1 + i, at, len, flags, base + 2 + i);
        }
        let status = self.layout.status(slot);
        self.set_descriptor(slot, 1 + data, status, 1, Desc::WRITE, 0);
        if shape.indirect {
            self.refer_to_table(slot, data + 2);
        }
    }

    fn set_descriptor(&self, slot: u16, i: u16, at: usize, len: u32, flags: u16, next: u16) {
        assert!(i < self.layout.shape.chain());
        let desc = Desc {
            addr: GuestMemory::guest_address(at),
            len,
            flags,
            next,
        };
        // Tables of packed queues have an id instead of a link, and then the flags, of which only
        // one has a meaning.
        let desc = match self.layout.shape {
            Shape {
                indirect: true,
                packed: true,
                ..
            } => Desc {
                flags: 0,
                next: flags & Desc::WRITE,
                ..desc
            },
            _ => desc,
        };
        let byte = usize::from(slot) * self.table_stride + 16 * usize::from(i);
        // SAFETY: descriptor `i` of the slot's table, which `new` placed.
        store(unsafe { self.tables.add(byte) }.cast(), desc);
    }

    #[inline(always)]
    fn status_byte(&self, slot: u16) -> &AtomicU8 {
        debug_assert!(slot < self.layout.shape.slots);
        // SAFETY: one byte per slot, only accessed atomically.
        unsafe { AtomicU8::from_ptr(self.status.add(usize::from(slot))) }
    }

    /// Returns the status that the device wrote.
    #[inline(always)]
    pub fn status(&self, slot: u16) -> u8 {
        self.status_byte(slot).load(Ordering::Relaxed)
    }

    /// Resets the status, to detect a device that does not write it.
    #[inline(always)]
    pub fn clear_status(&self, slot: u16) {
        self.status_byte(slot)
            .store(STATUS_UNWRITTEN, Ordering::Relaxed);
    }

    /// Returns the operation for which the slot was last prepared.
    #[inline(always)]
    pub fn op(&self, slot: u16) -> Op {
        self.ops[usize::from(slot)]
    }

    /// Returns the maximum number of bytes that the device may write, the maximum `len` of the used
    /// entry.
    pub fn writable(&self, slot: u16) -> u32 {
        match self.op(slot) {
            Op::Read => self.layout.shape.len + 1,
            _ => 1,
        }
    }

    /// Returns the slot's data buffer.
    pub fn buffer(&self, slot: u16) -> Buffer {
        assert!(slot < self.layout.shape.slots);
        let at = usize::from(slot) * self.layout.data_stride;
        // SAFETY: whole pages of the slot's own inside guest memory, which
        // outlives the slots.
        unsafe { Buffer::new(self.data.add(at), self.layout.shape.len as usize) }
    }
}

/// Returns the request type (VIRTIO_BLK_T_*) of an operation.
fn wire_type(op: Op) -> u32 {
    match op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Flush => 4,
        Op::Discard => 11,
        Op::WriteZeroes => 13,
    }
}

/// Writes a descriptor as two 8-byte halves, each atomically, because a broken device may read it
/// at any time.
fn store(at: *mut Desc, desc: Desc) {
    let tail = u64::from(desc.len) | u64::from(desc.flags) << 32 | u64::from(desc.next) << 48;
    // SAFETY: private callers pass descriptors inside guest memory, aligned to
    // 16 and only accessed atomically.
    unsafe {
        AtomicU64::from_ptr(at.cast()).store(desc.addr, Ordering::Relaxed);
        AtomicU64::from_ptr(at.cast::<u64>().add(1)).store(tail, Ordering::Relaxed);
    }
}
