//! The bodies of the fuzz targets: hostile guests generated from bytes.
//!
//! The targets check that nothing panics. No address outside the guest's memory is accessed (guard
//! pages detect that) or passed to the disk. Each request that reaches the disk is valid for the
//! disk. Each popped head is answered.

use super::{Buffer, Driver, TestMemory, context, disk};
use crate::features::{BLK_F_FLUSH, RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use crate::inflight::region_size;
use crate::{BlkDevice, BlkQueue, DirtyLog, InflightQueue};
use fathom_core::{Cx, DiskInfo, Op, Request, RequestId, Source};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;

pub use super::fuzz_packed::packed_ring;

/// Two adjacent regions and a separate one.
const REGIONS: [(u64, u64); 3] = [(0, 0x3000), (0x3000, 0x2000), (0x8000, 0x1000)];
const RINGS: u64 = 0;
const INFLIGHT: u64 = 0x8000;
const LOG: u64 = 0x8800;
const LOG_LEN: usize = 64;
const MAX_SIZE: u16 = 16;
/// Shared by data, headers and tables, so that they overlap. Spans the boundary of two regions.
const SCRATCH: u64 = 0x2800;
const SCRATCH_LEN: u64 = 0x1000;
/// Location of indirect tables.
const TABLE: u64 = 0x1000;
const STATUS: u64 = 0x2ffe;

/// The fuzzer's bytes, read as numbers; zeroes after the end.
pub(super) struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub(super) fn new(data: &'a [u8]) -> Bytes<'a> {
        Bytes(data)
    }

    pub(super) fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(n.min(self.0.len()));
        self.0 = tail;
        head
    }

    pub(super) fn number<const N: usize>(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let taken = self.take(N);
        bytes[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(bytes)
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.number::<1>() as u8
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.number::<2>() % limit
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true in about one of `n` cases.
    pub(super) fn rarely(&mut self, n: u8) -> bool {
        self.byte() % n == n - 1
    }

    /// Returns an address that is mostly in memory.
    pub(super) fn address(&mut self) -> u64 {
        if !self.rarely(16) {
            return SCRATCH + self.below(SCRATCH_LEN - 0x400);
        }
        let small = self.below(1024);
        match self.byte() % 4 {
            0 => self.number::<8>(),
            1 => 0x5000 - small,
            2 => 0x9000 - small,
            _ => 0x8000 + small,
        }
    }

    /// Returns a length that is mostly typical for data.
    pub(super) fn len(&mut self) -> u32 {
        match self.byte() % 32 {
            0 => self.number::<4>() as u32,
            1 => self.byte().into(),
            2 => 16,
            3 => 0,
            n => 512 << (n % 2),
        }
    }
}

/// A guest with one queue.
struct Guest {
    memory: TestMemory,
    driver: Driver,
    queue: BlkQueue,
    cx: Cx,
    /// Requests at the disk.
    pending: Vec<RequestId>,
    /// Number of requests popped; `answered` is the number of replies.
    popped: u64,
    answered: u64,
    /// The last `pop` failed, so its requests were not counted.
    broken: bool,
}

thread_local! {
    /// Guest memory is mapped once, because mapping it is most of the work.
    static MEMORY: RefCell<TestMemory> = RefCell::new(TestMemory::new(&REGIONS));
}

fn memory() -> TestMemory {
    let memory = MEMORY.with_borrow(TestMemory::clone);
    for (gpa, len) in REGIONS {
        // SAFETY: a whole region, which no other code uses now.
        unsafe { memory.at(gpa, len as usize).write_bytes(0, len as usize) };
    }
    memory
}

/// The memory of a guest, and the requests in it.
pub(super) struct RingMemory;

impl RingMemory {
    pub(super) const RINGS: u64 = RINGS;
    pub(super) const INFLIGHT: u64 = INFLIGHT;
    /// Place and length of the dirty log.
    pub(super) const LOG: (u64, usize) = (LOG, LOG_LEN);
    pub(super) const TABLE: u64 = TABLE;

    pub(super) fn memory() -> TestMemory {
        memory()
    }

    /// Writes those bytes that lie in memory.
    pub(super) fn write(memory: &TestMemory, at: u64, data: &[u8]) {
        for (i, byte) in data.iter().enumerate() {
            let gpa = at.wrapping_add(i as u64);
            if memory.guest().translate(gpa, 1).is_some() {
                memory.write(gpa, &[*byte]);
            }
        }
    }

    /// Writes a request that is nearly well-formed. Returns its buffers.
    pub(super) fn request(memory: &TestMemory, bytes: &mut Bytes) -> Vec<Buffer> {
        const KINDS: [u8; 8] = [0, 0, 1, 1, 4, 8, 11, 13];
        let write = |at, data: &[u8]| RingMemory::write(memory, at, data);
        let kind = KINDS[usize::from(bytes.byte() % 8)];
        let header = bytes.address();
        write(
            header,
            &[kind, 0, 0, 0, 0, 0, 0, 0, bytes.byte(), 0, 0, 0, 0, 0, 0, 0],
        );
        let mut chain = vec![Buffer::readable(header, 16)];
        if bytes.rarely(8) {
            chain[0].len = 5;
            chain.push(Buffer::readable(header.wrapping_add(5), 11));
        }
        match kind {
            4 => {}
            8 => chain.push(Buffer::writable(bytes.address(), 20)),
            11 | 13 => {
                let range = bytes.address();
                let (len, flags) = (bytes.byte(), bytes.byte() % 4 / 2);
                write(
                    range,
                    &[7, 0, 0, 0, 0, 0, 0, 0, len, 0, 0, 0, flags, 0, 0, 0],
                );
                chain.push(Buffer::readable(range, 16));
            }
            _ => data(kind == 0, bytes, &mut chain),
        }
        if bytes.rarely(16) {
            data(bytes.rarely(2), bytes, &mut chain);
        }
        chain.push(Buffer::writable(STATUS + u64::from(bytes.byte() % 4), 1));
        chain
    }
}

fn data(writable: bool, bytes: &mut Bytes, chain: &mut Vec<Buffer>) {
    for _ in 0..=bytes.byte() % 6 {
        let writable = writable != bytes.rarely(64);
        let (gpa, len) = (bytes.address(), bytes.len());
        chain.push(Buffer { gpa, len, writable });
    }
}

/// Checks the guarantees that `Request` gives the disk.
pub(super) fn check(memory: &TestMemory, request: &Request) {
    let info: DiskInfo = disk();
    assert_eq!((request.offset | request.len) % 512, 0);
    assert!(request.offset + request.len <= info.size);
    let mut sum = 0;
    for segment in &request.segments {
        let (host, len) = (segment.iov_base as *const u8, segment.iov_len as u64);
        let gpa = memory.guest().gpa_of(host).expect("in guest memory");
        let whole = memory.guest().translate(gpa, len);
        assert_eq!(whole.map(|at| at.as_ptr().cast_const()), Some(host));
        assert!(len > 0);
        sum += len;
    }
    match request.op {
        Op::Read | Op::Write => assert!(sum == request.len && sum > 0),
        Op::Flush => assert_eq!((sum, request.len), (0, 0)),
        Op::BlockStatus => unreachable!("virtio-blk cannot ask for it"),
        Op::Discard | Op::WriteZeroes => assert!(sum == 0 && request.len > 0),
    }
}

impl Guest {
    fn new(bytes: &mut Bytes) -> Guest {
        let memory = memory();
        let choices = bytes.byte();
        let chosen = |bit: u8| choices >> bit & 1 == 1;
        let size = 1 << bytes.below(5);
        let mut driver = Driver::new(&memory, RINGS, size, chosen(0));
        driver.start_at(bytes.number::<2>() as u16);
        let when = |condition: bool, features: u64| if condition { features } else { 0 };
        let features = when(chosen(0), RING_F_EVENT_IDX)
            | when(!bytes.rarely(16), RING_F_INDIRECT_DESC)
            | when(chosen(2), BLK_F_FLUSH);
        let mut info = disk();
        info.read_only = chosen(1) && chosen(7);
        if chosen(3) {
            info.discard = None;
        }
        let guest = memory.guest();
        let part = |gpa, len| NonNull::new(memory.at(gpa, len)).expect("mapped");
        // SAFETY: parts of memory that is kept and that nothing else accesses except atomically.
        let (log, inflight) = unsafe {
            (
                DirtyLog::new(part(LOG, LOG_LEN), LOG_LEN, guest.clone()),
                InflightQueue::new(
                    part(INFLIGHT, region_size(MAX_SIZE)),
                    MAX_SIZE,
                    guest.clone(),
                ),
            )
        };
        let log = chosen(4).then(|| Arc::new(log));
        let inflight = chosen(5).then_some(inflight);
        let mut setup = driver.setup(features);
        if !chosen(6) {
            setup.log_addr = None;
        }
        let device = Arc::new(BlkDevice::new(info, "serial", 1));
        let queue = BlkQueue::new(setup, guest.clone(), log, inflight, device);
        Guest {
            driver,
            queue: queue.expect("the setup is good"),
            cx: context(usize::from(size)),
            pending: Vec::with_capacity(usize::from(size)),
            popped: 0,
            answered: 0,
            broken: false,
            memory,
        }
    }

    /// Pops requests; returns false if the queue is broken.
    fn pop(&mut self) -> bool {
        let before = self.pending.len();
        let room = self.queue.capacity() - before;
        let result = self.queue.pop(&mut self.cx, room, &mut self.pending);
        for id in &self.pending[before..] {
            check(&self.memory, &self.cx.slab[*id]);
        }
        let Ok(answered) = result else {
            self.broken = true;
            return false;
        };
        self.popped += (self.pending.len() - before) as u64 + u64::from(answered);
        self.answered += u64::from(answered);
        true
    }

    /// Answers the request at `index` of those that are pending.
    fn finish(&mut self, index: usize, errno: i32) {
        if index < self.pending.len() {
            let id = self.pending.swap_remove(index);
            self.cx.slab[id].error = errno;
            self.queue.finish(&self.cx.slab[id]);
            self.cx.slab.put(id);
            self.answered += 1;
        }
    }

    /// Answers everything. Afterwards, all popped heads are in the used ring.
    fn end(mut self, start: u16) {
        while !self.pending.is_empty() {
            self.finish(0, 0);
        }
        self.queue.publish(&mut self.cx);
        if self.broken {
            return;
        }
        assert_eq!(self.popped, self.answered);
        let used = self.driver.used_idx().wrapping_sub(start);
        assert_eq!(used, self.answered as u16);
    }

    /// Performs one random action of the guest or its disk. Returns false if the queue is broken.
    fn step(&mut self, bytes: &mut Bytes) -> bool {
        match bytes.byte() % 16 {
            0..=2 => return self.pop(),
            3 => self.finish(usize::from(bytes.byte() % 16), 0),
            4 => self.finish(usize::from(bytes.byte() % 16), libc::EIO),
            5 => drop(self.queue.publish(&mut self.cx)),
            6 => drop(self.queue.arm()),
            7 => self.queue.disarm(),
            8 if bytes.rarely(8) => self.driver.force_avail_idx(bytes.number::<2>() as u16),
            9 => self.driver.set_used_event(bytes.number::<2>() as u16),
            10 if bytes.rarely(4) => self.scribble(bytes),
            11 => self.describe(bytes),
            12 => {
                let past = if bytes.rarely(64) { 1 } else { 0 };
                let head = u16::from(bytes.byte()) % (self.driver.size() + past);
                return self.offer(head);
            }
            _ => {
                let head = self.request(bytes);
                return self.offer(head);
            }
        }
        true
    }

    /// Makes a head available, without overfilling the ring.
    fn offer(&mut self, head: u16) -> bool {
        let full = self.driver.size();
        if self.driver.ahead_of(self.queue.base() as u16) == full && !self.pop() {
            return false;
        }
        if self.driver.ahead_of(self.queue.base() as u16) < full {
            self.driver.offer(head);
            self.driver.publish();
        }
        true
    }

    /// Writes arbitrary bytes anywhere.
    fn scribble(&mut self, bytes: &mut Bytes) {
        let at = match bytes.byte() % 4 {
            0 => bytes.address(),
            1 => TABLE + bytes.below(0x1000),
            _ => bytes.below(Driver::ring_bytes(MAX_SIZE)),
        };
        self.scribble_at(at, bytes.take(4));
    }

    /// Writes bytes, except to the used index, which the test uses for counting. A driver that
    /// overwrites the used index harms only itself.
    fn scribble_at(&self, at: u64, data: &[u8]) {
        let used = self.driver.used_gpa()..self.driver.used_gpa() + 4;
        for (i, byte) in data.iter().enumerate() {
            let gpa = at.wrapping_add(i as u64);
            if !used.contains(&gpa) {
                RingMemory::write(&self.memory, gpa, &[*byte]);
            }
        }
    }

    /// Writes a random descriptor to the queue's table or to another one.
    fn describe(&mut self, bytes: &mut Bytes) {
        let index = u16::from(bytes.byte()) % MAX_SIZE;
        let (flags, next) = (u16::from(bytes.byte() % 8), u16::from(bytes.byte() % 17));
        let buffer = Buffer::readable(bytes.address(), bytes.len());
        let own = bytes.byte() & 1 == 0 && index < self.driver.size();
        let table = if own { self.driver.desc_gpa() } else { TABLE };
        self.driver.put(table, index, buffer, flags, next);
    }

    /// Writes a request that is nearly well-formed. Returns its head.
    fn request(&mut self, bytes: &mut Bytes) -> u16 {
        let chain = RingMemory::request(&self.memory, bytes);
        if bytes.rarely(8) {
            self.scribble_at(chain[0].gpa, bytes.take(16));
        }
        let head = u16::from(bytes.byte()) % self.driver.size();
        if chain.len() <= usize::from(self.driver.size() - head) && bytes.rarely(2) {
            self.driver.put_direct(head, &chain);
        } else {
            let table = TABLE + u64::from(head) * 256 + u64::from(bytes.rarely(8));
            self.driver.put_indirect(head, table, &chain);
        }
        head
    }
}

/// A guest that performs random actions in any order while its queue is served.
pub fn ring(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut guest = Guest::new(&mut bytes);
    let start = guest.driver.used_idx();
    while !bytes.is_empty() && guest.step(&mut bytes) {}
    guest.end(start);
}

/// A single request that is nearly well-formed.
pub fn request(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut guest = Guest::new(&mut bytes);
    let start = guest.driver.used_idx();
    let head = guest.request(&mut bytes);
    assert!(guest.offer(head) && guest.pop(), "the ring is sane");
    assert_eq!(guest.popped, 1);
    guest.end(start);
}
