//! A hostile guest with a packed queue, generated from bytes.

use super::fuzz::{Bytes, RingMemory, check};
use super::{Buffer, PackedDriver, TestMemory, Wish, context, disk};
use crate::features::{BLK_F_FLUSH, F_RING_PACKED, RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use crate::packed::Position;
use crate::packed_inflight::region_size;
use crate::{BlkDevice, DirtyLog, PackedBlkQueue, PackedInflight};
use fathom_core::{Cx, RequestId, Source};
use std::ptr::NonNull;
use std::sync::Arc;

const MAX_SIZE: u16 = 16;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

struct Guest {
    memory: TestMemory,
    driver: PackedDriver,
    /// None after a server could not start.
    queue: Option<PackedBlkQueue>,
    features: u64,
    has_log: bool,
    is_tracked: bool,
    cx: Cx,
    pending: Vec<RequestId>,
}

impl Guest {
    fn new(bytes: &mut Bytes) -> Guest {
        let memory = RingMemory::memory();
        let choices = bytes.byte();
        let chosen = |bit: u8| choices >> bit & 1 == 1;
        let size = 1 + bytes.below(MAX_SIZE.into()) as u16;
        let event_idx = chosen(0);
        let mut driver = PackedDriver::new(&memory, RingMemory::RINGS, size, event_idx);
        driver.start_at(Position {
            index: bytes.below(size.into()) as u16,
            wrap: chosen(1),
        });
        let when = |condition: bool, features: u64| if condition { features } else { 0 };
        let features = F_RING_PACKED
            | when(event_idx, RING_F_EVENT_IDX)
            | when(!bytes.rarely(16), RING_F_INDIRECT_DESC)
            | when(chosen(2), BLK_F_FLUSH);
        let mut guest = Guest {
            driver,
            queue: None,
            features,
            has_log: chosen(4),
            is_tracked: chosen(5),
            cx: context(usize::from(size)),
            pending: Vec::with_capacity(usize::from(size)),
            memory,
        };
        guest.start();
        assert!(guest.queue.is_some(), "the setup is good");
        guest
    }

    /// Starts a server, which may refuse what the guest has made of the in-flight region.
    fn start(&mut self) {
        let guest = self.memory.guest();
        let part = |gpa, len| NonNull::new(self.memory.at(gpa, len)).expect("mapped");
        let (log_at, log_len) = RingMemory::LOG;
        // SAFETY: parts of memory that is kept and that nothing else accesses except atomically.
        let (log, region) = unsafe {
            (
                DirtyLog::new(part(log_at, log_len), log_len, guest.clone()),
                PackedInflight::new(
                    part(RingMemory::INFLIGHT, region_size(MAX_SIZE)),
                    MAX_SIZE,
                    guest.clone(),
                ),
            )
        };
        let log = self.has_log.then(|| Arc::new(log));
        let region = self.is_tracked.then_some(region);
        let setup = self.driver.setup(self.features);
        let device = Arc::new(BlkDevice::new(disk(), "serial", 1));
        let queue = PackedBlkQueue::new(setup, guest.clone(), log, region, device);
        self.queue = queue.ok();
    }

    /// Kills the server, and starts another one.
    fn kill(&mut self) {
        self.queue = None;
        self.pending.drain(..).for_each(|id| self.cx.slab.put(id));
        self.start();
    }

    /// Pops requests; returns false if the queue is broken.
    fn pop(&mut self) -> bool {
        let Some(queue) = &mut self.queue else {
            return false;
        };
        let before = self.pending.len();
        let room = queue.capacity() - before;
        let result = queue.pop(&mut self.cx, room, &mut self.pending);
        for id in &self.pending[before..] {
            check(&self.memory, &self.cx.slab[*id]);
        }
        result.is_ok()
    }

    fn finish(&mut self, index: usize, errno: i32) {
        if let Some(queue) = &mut self.queue
            && index < self.pending.len()
        {
            let id = self.pending.swap_remove(index);
            self.cx.slab[id].error = errno;
            queue.finish(&self.cx.slab[id]);
            self.cx.slab.put(id);
        }
    }

    /// Performs one random action. Returns false if the queue is broken.
    fn step(&mut self, bytes: &mut Bytes) -> bool {
        let kind = bytes.byte() % 16;
        let Some(queue) = &mut self.queue else {
            return false;
        };
        match kind {
            0..=2 => return self.pop(),
            3 => self.finish(usize::from(bytes.byte() % 16), 0),
            4 => self.finish(usize::from(bytes.byte() % 16), libc::EIO),
            5 | 6 => drop(queue.publish(&mut self.cx)),
            7 if queue.arm() => queue.disarm(),
            8 => self.driver.wish(match bytes.byte() % 3 {
                0 => Wish::Always,
                1 => Wish::Never,
                _ => Wish::At(Position::of_word(bytes.number::<2>() as u16)),
            }),
            9 if bytes.rarely(8) => self.kill(),
            10 if bytes.rarely(4) => self.scribble(bytes),
            11 => self.describe(bytes),
            _ => self.offer(bytes),
        }
        true
    }

    /// Writes arbitrary bytes to the ring, the in-flight region or anywhere else.
    fn scribble(&mut self, bytes: &mut Bytes) {
        let at = match bytes.byte() % 4 {
            0 => bytes.address(),
            1 => RingMemory::INFLIGHT + bytes.below(region_size(MAX_SIZE) as u64),
            _ => RingMemory::RINGS + bytes.below(PackedDriver::ring_bytes(MAX_SIZE)),
        };
        RingMemory::write(&self.memory, at, bytes.take(4));
    }

    /// Writes a descriptor to a random place, or to an indirect table.
    fn describe(&mut self, bytes: &mut Bytes) {
        let index = u16::from(bytes.byte()) % MAX_SIZE;
        let owner = [AVAIL, USED, AVAIL | USED, 0][usize::from(bytes.byte() % 4)];
        let flags = u16::from(bytes.byte() % 8) | owner;
        let id = u16::from(bytes.byte()) % (MAX_SIZE + 1);
        let buffer = Buffer::readable(bytes.address(), bytes.len());
        let own = bytes.byte() & 1 == 0 && index < self.driver.size();
        let table = if own {
            self.driver.ring_gpa()
        } else {
            RingMemory::TABLE
        };
        self.driver.put(table, index, buffer, id, flags);
    }

    /// Makes a request available that is nearly well-formed, whether or not there is room for it.
    fn offer(&mut self, bytes: &mut Bytes) {
        let chain = RingMemory::request(&self.memory, bytes);
        let mut id = u16::from(bytes.byte()) % self.driver.size();
        if bytes.rarely(64) {
            id = bytes.number::<2>() as u16;
        }
        let is_free = id >= self.driver.size() || !self.driver.has(id);
        if !is_free && !bytes.rarely(32) {
            return;
        }
        if chain.len() <= usize::from(self.driver.size()) && bytes.rarely(2) {
            if chain.len() <= usize::from(self.driver.room()) || bytes.rarely(32) {
                self.driver.offer(id, &chain);
            }
        } else if self.driver.room() > 0 || bytes.rarely(32) {
            let slot = u64::from(id % MAX_SIZE) * 256;
            let table = RingMemory::TABLE + slot + u64::from(bytes.rarely(8));
            self.driver.offer_indirect(id, table, &chain);
        }
        self.driver.publish();
        // Used buffers are free again, as far as this driver can follow.
        self.driver.forget_used();
    }
}

/// A guest with a packed queue that performs random actions while its queue is served, and whose
/// servers are killed.
pub fn packed_ring(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let mut guest = Guest::new(&mut bytes);
    while !bytes.is_empty() && guest.step(&mut bytes) {}
    while !guest.pending.is_empty() && guest.queue.is_some() {
        guest.finish(0, 0);
    }
    if let Some(queue) = &mut guest.queue {
        queue.publish(&mut guest.cx);
    }
}
