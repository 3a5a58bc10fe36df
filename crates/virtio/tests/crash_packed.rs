//! Checks that a packed queue's successor completes each request exactly once, wherever the queue
//! was killed.
//!
//! As for split queues in `crash.rs`. The ring of a packed queue does not show what was offered,
//! because used descriptors overwrite it. Therefore the driver keeps journals in shared memory.

mod single_step;

use fathom_core::{Cx, RequestId, Source};
use fathom_virtio::features::{BLK_F_FLUSH, F_RING_PACKED, RING_F_EVENT_IDX};
use fathom_virtio::packed::{INITIAL_BASE, Position};
use fathom_virtio::testing::{Buffer, PackedDriver, TestMemory, context, device, finish, pop};
use fathom_virtio::{PackedBlkQueue, PackedInflight};
use single_step::single_step;
use std::ptr::NonNull;
use std::sync::Arc;

/// Not a power of two.
const SIZE: u16 = 13;
const RING: u64 = 0x1000;
const REGION: u64 = 0x2000;
/// Number of buffers that were offered, and their ids; written before the offer.
const OFFERED: u64 = 0x2c00;
/// Number of buffers that the driver took back, and their ids; written afterwards.
const TAKEN: u64 = 0x2d00;
/// Ring, in-flight region and journals: the memory that is copied.
const SHARED: std::ops::Range<u64> = 0x1000..0x3000;
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
/// Initial position, chosen so that the ring wraps around during the test.
const START: Position = Position {
    index: 10,
    wrap: true,
};

struct Machine {
    memory: TestMemory,
    driver: PackedDriver,
    queue: PackedBlkQueue,
    cx: Cx,
}

fn memory_with(shared: Option<&[u8]>) -> TestMemory {
    let memory = TestMemory::new(&[(0, 0x8000)]);
    // The header of a read (type 0) of sector 0.
    memory.write(HEADER, &[0; 16]);
    if let Some(bytes) = shared {
        memory.write(SHARED.start, bytes);
    }
    memory
}

/// Starts a queue. Only for a new region does the base count.
fn queue_on(memory: &TestMemory, driver: &PackedDriver, is_new: bool) -> PackedBlkQueue {
    let base = NonNull::new(memory.at(REGION, 0x800)).unwrap();
    // SAFETY: the mapping is kept, and used only by the queue.
    let region = unsafe { PackedInflight::new(base, SIZE, memory.guest().clone()) };
    let guest = memory.guest().clone();
    let mut setup = driver.setup(RING_F_EVENT_IDX | BLK_F_FLUSH | F_RING_PACKED);
    if !is_new {
        setup.base = INITIAL_BASE;
    }
    PackedBlkQueue::new(setup, guest, None, Some(region), Arc::new(device())).expect("it starts")
}

/// Chains of two or three descriptors.
fn chain(id: u16) -> Vec<Buffer> {
    let data = DATA + 1024 * u64::from(id);
    let mut chain = vec![Buffer::readable(HEADER, 16)];
    if id % 2 == 1 {
        chain.push(Buffer::writable(data + 512, 512));
    }
    chain.push(Buffer::writable(data, 513));
    chain
}

fn count(id: u16) -> u16 {
    2 + id % 2
}

fn len(id: u16) -> u32 {
    513 + 512 * u32::from(id % 2)
}

fn note(memory: &TestMemory, journal: u64, id: u16) {
    let n = memory.read(journal, 1)[0];
    memory.write(journal + 1 + u64::from(n), &[id as u8]);
    memory.write(journal, &[n + 1]);
}

fn noted(memory: &TestMemory, journal: u64) -> Vec<u16> {
    let n = memory.read(journal, 1)[0];
    let ids = memory.read(journal + 1, n.into());
    ids.into_iter().map(u16::from).collect()
}

impl Machine {
    fn new() -> Machine {
        let memory = memory_with(None);
        let mut driver = PackedDriver::new(&memory, RING, SIZE, true);
        driver.start_at(START);
        let queue = queue_on(&memory, &driver, true);
        let cx = context(usize::from(SIZE));
        Machine {
            memory,
            driver,
            queue,
            cx,
        }
    }

    fn offer(&mut self, ids: &[u16]) {
        for id in ids {
            note(&self.memory, OFFERED, *id);
            self.driver.offer(*id, &chain(*id));
        }
    }

    fn take_used(&mut self) {
        while let Some((id, _)) = self.driver.take_used() {
            note(&self.memory, TAKEN, id);
        }
    }

    fn pop(&mut self, room: usize) -> Vec<RequestId> {
        let mut batch = Vec::new();
        let popped = self.queue.pop(&mut self.cx, room, &mut batch);
        popped.expect("a sane driver");
        batch
    }

    fn finish(&mut self, ids: &[RequestId]) {
        finish(&mut self.queue, &mut self.cx, ids, 0);
        self.queue.publish(&mut self.cx);
    }
}

/// Runs batches of different sizes, out of order, with reused buffers, one batch of the whole ring,
/// and chains around the ring's end.
fn scenario(m: &mut Machine) {
    m.offer(&[0, 1, 2, 3]);
    let first = m.pop(3);
    m.finish(&[first[2], first[0]]);
    m.take_used();
    m.offer(&[2]);
    let second = m.pop(8);
    m.finish(&[second[1], first[1], second[0]]);
    m.take_used();
    m.offer(&[5, 4, 1, 3, 0]);
    let third = m.pop(8);
    m.finish(&third);
    m.take_used();
    m.offer(&[0, 5]);
    let last = m.pop(8);
    m.finish(&[last[1]]);
    m.finish(&[last[0]]);
}

/// Returns the driver that continues after `copy`, and the buffers that the device has, in order.
/// The last of them may not be available yet.
fn driver_after(memory: &TestMemory) -> (PackedDriver, Vec<u16>) {
    let mut driver = PackedDriver::new(memory, RING, SIZE, true);
    let mut left = noted(memory, OFFERED);
    let (mut used, mut end) = (START, START);
    left.iter().for_each(|id| end = end.after(count(*id), SIZE));
    for id in noted(memory, TAKEN) {
        used = used.after(count(id), SIZE);
        let at = left.iter().position(|offered| *offered == id);
        left.remove(at.expect("taken back what was offered"));
    }
    let counts: Vec<(u16, u16)> = left.iter().map(|id| (*id, count(*id))).collect();
    driver.resume_at(used, end, &counts);
    (driver, left)
}

/// Recovers from `copy`. Used and resubmitted buffers together must be the offered ones.
fn check_recovery(copy: &[u8]) {
    let memory = memory_with(Some(copy));
    let (mut driver, mut left) = driver_after(&memory);
    while let Some((id, written)) = driver.take_used() {
        assert_eq!(written, len(id));
        let at = left.iter().position(|offered| *offered == id);
        left.remove(at.expect("used what was offered, once"));
    }
    let mut queue = queue_on(&memory, &driver, memory.read(REGION + 8, 1) == [0]);
    let mut cx = context(usize::from(SIZE));
    let (popped, answered) = pop(&mut queue, &mut cx).expect("a sane driver");
    assert_eq!(answered, 0);
    let ids: Vec<u16> = popped.iter().map(|id| cx.slab[*id].tag).collect();
    let visible = left.len() - usize::from(ids.len() + 1 == left.len());
    assert_eq!(
        ids,
        left[..visible],
        "what was not used, in the order it was offered"
    );
    // The requests complete one by one, the last one first: nothing that a killed device wrote may
    // become visible.
    for id in popped.iter().rev() {
        finish(&mut queue, &mut cx, &[*id], 0);
        queue.publish(&mut cx);
        let tag = cx.slab[*id].tag;
        assert_eq!(driver.take_used(), Some((tag, len(tag))));
        assert_eq!(driver.take_used(), None);
    }
    drop(queue);
    let queue = queue_on(&memory, &driver, false);
    assert_eq!(queue.inherited(), 0, "nothing is in flight any more");
}

#[test]
fn each_packed_request_is_completed_once_wherever_it_is_killed() {
    let mut machine = Machine::new();
    let memory = machine.memory.clone();
    let copies = single_step(&memory, &SHARED, || scenario(&mut machine));
    // At least eight stores per request.
    assert!(copies.len() > 12 * 8, "only {} changes", copies.len());
    copies.iter().for_each(|copy| check_recovery(copy));
    let some = copies.iter().step_by(29);
    some.for_each(|copy| kill_successor(copy));
}

/// The successor that starts from `copy` may be killed as well.
fn kill_successor(copy: &[u8]) {
    let memory = memory_with(Some(copy));
    let (driver, _) = driver_after(&memory);
    let is_new = memory.read(REGION + 8, 1) == [0];
    let body = || {
        let mut queue = queue_on(&memory, &driver, is_new);
        let mut cx = context(usize::from(SIZE));
        let (popped, _) = pop(&mut queue, &mut cx).expect("a sane driver");
        for ids in popped.rchunks(2) {
            finish(&mut queue, &mut cx, ids, 0);
            queue.publish(&mut cx);
        }
    };
    for copy in single_step(&memory, &SHARED, body) {
        check_recovery(&copy);
    }
}
