//! Checks that a queue's successor completes each request exactly once, wherever the queue was
//! killed.
//!
//! A child process serves a queue in shared memory. The parent single-steps the child and copies
//! the memory after every change. Each copy is what a `kill -9` at that moment would have left.
//!
//! This test is alone in its program, because a child forked from several threads could find locks
//! that are never released.

mod single_step;

use fathom_core::{Cx, RequestId, Source};
use fathom_virtio::features::{BLK_F_FLUSH, RING_F_EVENT_IDX};
use fathom_virtio::testing::{Buffer, Driver, TestMemory, context, device, finish, pop};
use fathom_virtio::{BlkQueue, InflightQueue};
use single_step::single_step;
use std::ptr::NonNull;
use std::sync::Arc;

const SIZE: u16 = 16;
const RINGS: u64 = 0x1000;
const INFLIGHT: u64 = 0x2000;
/// Rings and in-flight region: the memory that is copied.
const SHARED: std::ops::Range<u64> = 0x1000..0x3000;
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
/// Initial ring index, chosen so that the indices wrap around during the test.
const START: u16 = u16::MAX - 3;

/// A guest, its queue, and the worker's part.
struct Machine {
    memory: TestMemory,
    driver: Driver,
    queue: BlkQueue,
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

fn queue_on(memory: &TestMemory, driver: &Driver) -> BlkQueue {
    let base = NonNull::new(memory.at(INFLIGHT, 0x1000)).unwrap();
    // SAFETY: the mapping is kept, and used only by the queue.
    let inflight = unsafe { InflightQueue::new(base, SIZE, memory.guest().clone()) };
    let guest = memory.guest().clone();
    let setup = driver.setup(RING_F_EVENT_IDX | BLK_F_FLUSH);
    BlkQueue::new(setup, guest, None, Some(inflight), Arc::new(device())).expect("it starts")
}

impl Machine {
    fn new() -> Machine {
        let memory = memory_with(None);
        let mut driver = Driver::new(&memory, RINGS, SIZE, true);
        driver.start_at(START);
        for head in 0..SIZE / 2 {
            let chain = [
                Buffer::readable(HEADER, 16),
                Buffer::writable(DATA + 512 * u64::from(head), 512),
            ];
            driver.put_direct(head * 2, &chain);
            // The status byte is the last byte of the data's descriptor.
            driver.put(
                RINGS,
                head * 2 + 1,
                Buffer {
                    len: 513,
                    ..chain[1]
                },
                2,
                0,
            );
        }
        let queue = queue_on(&memory, &driver);
        let cx = context(usize::from(SIZE));
        Machine {
            memory,
            driver,
            queue,
            cx,
        }
    }

    fn offer(&mut self, heads: &[u16]) {
        heads.iter().for_each(|head| self.driver.offer(*head));
        self.driver.publish();
    }

    fn pop(&mut self, room: usize) -> Vec<RequestId> {
        let mut batch = Vec::new();
        self.queue
            .pop(&mut self.cx, room, &mut batch)
            .expect("a sane driver");
        batch
    }

    fn finish(&mut self, ids: &[RequestId]) {
        finish(&mut self.queue, &mut self.cx, ids, 0);
        self.queue.publish(&mut self.cx);
    }
}

/// Runs batches of different sizes, out of order, with reused heads.
fn scenario(m: &mut Machine) {
    m.offer(&[0, 2, 4, 6, 8]);
    let first = m.pop(4);
    m.finish(&[first[2], first[0]]);
    m.driver.take_used();
    m.offer(&[4]);
    let second = m.pop(8);
    m.finish(&[second[1], first[3], second[0]]);
    m.offer(&[0, 6]);
    let third = m.pop(8);
    m.finish(&[first[1]]);
    m.finish(&[third[1], third[0]]);
}

/// Returns the heads that were made available since `START`, in order.
fn offered(memory: &TestMemory, driver: &Driver) -> Vec<u16> {
    let avail = driver.avail_gpa();
    let count = memory.read_u16(avail + 2).wrapping_sub(START);
    let slot = |i: u16| u64::from(START.wrapping_add(i) % SIZE);
    (0..count)
        .map(|i| memory.read_u16(avail + 4 + 2 * slot(i)))
        .collect()
}

/// Recovers from `copy`. Used heads and resubmitted heads together must be the offered ones. The
/// heads must be resubmitted in the order in which they were popped.
fn check_recovery(copy: &[u8]) {
    let memory = memory_with(Some(copy));
    let mut driver = Driver::new(&memory, RINGS, SIZE, true);
    driver.resume_at(START);
    let mut left = offered(&memory, &driver);
    while let Some((head, len)) = driver.take_used() {
        assert_eq!(len, 513);
        let at = left.iter().position(|offered| u32::from(*offered) == head);
        left.remove(at.expect("used what was offered, once"));
    }
    let mut queue = queue_on(&memory, &driver);
    let mut cx = context(usize::from(SIZE));
    let (popped, answered) = pop(&mut queue, &mut cx).expect("a sane driver");
    assert_eq!(answered, 0);
    let heads: Vec<u16> = popped.iter().map(|id| cx.slab[*id].tag).collect();
    assert_eq!(
        heads, left,
        "what was not used, in the order it was offered"
    );
    finish(&mut queue, &mut cx, &popped, 0);
    queue.publish(&mut cx);
    let used: Vec<u16> = std::iter::from_fn(|| driver.take_used())
        .map(|(head, _)| head as u16)
        .collect();
    assert_eq!(used, heads);
    let (_, inflight) = queue.into_parts();
    let recovery = inflight.unwrap().recover(SIZE, driver.used_idx()).unwrap();
    assert!(recovery.heads.is_empty(), "nothing is in flight any more");
}

#[test]
fn each_request_is_completed_once_wherever_the_queue_is_killed() {
    let mut machine = Machine::new();
    let memory = machine.memory.clone();
    let copies = single_step(&memory, &SHARED, || scenario(&mut machine));
    // At least six stores per request.
    assert!(
        copies.len() > 8 * 6,
        "only {} changes were seen",
        copies.len()
    );
    copies.iter().for_each(|copy| check_recovery(copy));
    copies
        .iter()
        .step_by(7)
        .for_each(|copy| kill_successor(copy));
}

/// The successor that starts from `copy` may be killed as well.
fn kill_successor(copy: &[u8]) {
    let memory = memory_with(Some(copy));
    let mut driver = Driver::new(&memory, RINGS, SIZE, true);
    driver.resume_at(START);
    let body = || {
        let mut queue = queue_on(&memory, &driver);
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
