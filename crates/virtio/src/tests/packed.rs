//! Packed queues, driven by a model of a driver.

use super::fixture::*;
use crate::features::{BLK_F_FLUSH, F_RING_PACKED, RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use crate::packed::{INITIAL_BASE, Position};
use crate::packed_inflight::region_size;
use crate::request::T_IN;
use crate::ring::RingError;
use crate::testing::{
    Buffer, PackedDriver, TestMemory, Wish, context, device, finish, pop, signalled,
};
use crate::{PackedBlkQueue, PackedInflight, QueueError, QueueSetup};
use fathom_core::{Cx, RequestId, Source};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

const RING: u64 = 0x1000;
const REGION: u64 = 0x8000;
const TABLES: u64 = 0xa000;
const BUFFERS: u64 = 0x1_0000;
const STRIDE: u64 = 0x2000;
const MAX_SIZE: u16 = 24;
const PACKED: u64 = F_RING_PACKED | RING_F_INDIRECT_DESC | RING_F_EVENT_IDX | BLK_F_FLUSH;

fn memory() -> TestMemory {
    TestMemory::new(&[(0, 0x8_0000)])
}

fn region(memory: &TestMemory) -> PackedInflight {
    let len = region_size(MAX_SIZE);
    let base = NonNull::new(memory.at(REGION, len)).unwrap();
    // SAFETY: a part of memory that is kept, and that only the queue uses.
    unsafe { PackedInflight::new(base, MAX_SIZE, memory.guest().clone()) }
}

/// A driver's step, or what happens to the server.
#[derive(Clone, Debug)]
enum Step {
    /// A read of this many segments, in an indirect table or not.
    Offer(u16, bool),
    Pop(usize),
    Finish(prop::sample::Index),
    Publish,
    TakeUsed,
    /// The server is killed, if it can recover.
    Kill,
    /// The server stops its queue after its requests, and starts it again.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1u16..6, any::<bool>()).prop_map(|(n, indirect)| Step::Offer(n, indirect)),
        5 => (1usize..8).prop_map(Step::Pop),
        6 => any::<prop::sample::Index>().prop_map(Step::Finish),
        3 => Just(Step::Publish),
        4 => Just(Step::TakeUsed),
        1 => Just(Step::Kill),
        1 => Just(Step::Restart),
    ]
}

/// A driver, its device, and what must come back.
struct Model {
    memory: TestMemory,
    driver: PackedDriver,
    queue: Option<PackedBlkQueue>,
    cx: Cx,
    is_tracked: bool,
    /// Number of segments of each buffer's read.
    segments: Vec<u16>,
    /// Buffers that were not taken yet.
    offered: VecDeque<u16>,
    /// Buffers that were taken and not published, in order.
    taken: Vec<u16>,
    at_disk: Vec<RequestId>,
    finished: Vec<u16>,
    published: VecDeque<u16>,
}

impl Model {
    fn new(size: u16, start: Position, is_tracked: bool) -> Model {
        let memory = memory();
        let mut driver = PackedDriver::new(&memory, RING, size, true);
        driver.start_at(start);
        let mut model = Model {
            driver,
            queue: None,
            cx: context(usize::from(size)),
            is_tracked,
            segments: vec![0; usize::from(size)],
            offered: VecDeque::new(),
            taken: Vec::new(),
            at_disk: Vec::new(),
            finished: Vec::new(),
            published: VecDeque::new(),
            memory,
        };
        model.start(model.driver.setup(PACKED));
        model
    }

    fn start(&mut self, setup: QueueSetup) {
        let region = self.is_tracked.then(|| region(&self.memory));
        let memory = self.memory.guest().clone();
        let queue = PackedBlkQueue::new(setup, memory, None, region, Arc::new(device()));
        self.queue = Some(queue.expect("a good queue"));
    }

    fn queue(&mut self) -> (&mut PackedBlkQueue, &mut Cx) {
        (self.queue.as_mut().unwrap(), &mut self.cx)
    }

    fn offer(&mut self, segments: u16, indirect: bool) {
        let room = self.driver.room();
        let free = (0..self.driver.size()).find(|id| !self.driver.has(*id));
        let needed = if indirect { 1 } else { segments + 1 };
        let Some(id) = free.filter(|_| room >= needed) else {
            return;
        };
        let at = BUFFERS + u64::from(id) * STRIDE;
        self.memory.write(at, &header(T_IN, id.into()));
        let mut chain = vec![Buffer::readable(at, 16)];
        for i in 0..segments {
            // The status is the byte after the last segment.
            let extra = if i + 1 == segments { 1 } else { 0 };
            let place = at + 0x200 + u64::from(i) * 1024;
            chain.push(Buffer::writable(place, 512 + extra));
        }
        if indirect {
            let table = TABLES + u64::from(id) * 256;
            self.driver.offer_indirect(id, table, &chain);
        } else {
            self.driver.offer(id, &chain);
        }
        self.segments[usize::from(id)] = segments;
        self.offered.push_back(id);
    }

    fn pop(&mut self, room: usize) {
        let before = self.at_disk.len();
        let mut batch = std::mem::take(&mut self.at_disk);
        let (queue, cx) = self.queue();
        let room = room.min(queue.capacity() - before);
        assert_eq!(queue.pop(cx, room, &mut batch).unwrap(), 0);
        for id in &batch[before..] {
            let request = &self.cx.slab[*id];
            let tag = request.tag;
            if self.taken.contains(&tag) {
                assert!(!self.finished.contains(&tag));
            } else {
                assert_eq!(self.offered.pop_front(), Some(tag), "in the driver's order");
                self.taken.push(tag);
            }
            assert_eq!(request.offset, u64::from(tag) * 512);
            let segments = self.segments[usize::from(tag)];
            assert_eq!(request.segments.len(), usize::from(segments));
            assert_eq!(request.len, 512 * u64::from(segments));
        }
        self.at_disk = batch;
    }

    fn finish(&mut self, index: usize) {
        let id = self.at_disk.remove(index);
        self.finished.push(self.cx.slab[id].tag);
        let (queue, cx) = self.queue();
        finish(queue, cx, &[id], 0);
    }

    fn publish(&mut self) {
        let (queue, cx) = self.queue();
        queue.publish(cx);
        let finished = std::mem::take(&mut self.finished);
        self.taken.retain(|id| !finished.contains(id));
        self.published.extend(finished);
    }

    fn take_used(&mut self) {
        while let Some((id, len)) = self.driver.take_used() {
            assert_eq!(self.published.pop_front(), Some(id));
            let segments = u32::from(self.segments[usize::from(id)]);
            assert_eq!(len, 512 * segments + 1);
        }
        assert!(self.published.is_empty(), "all is visible");
    }

    /// Starts a successor that knows only what the region says.
    fn kill(&mut self) {
        if !self.is_tracked {
            return;
        }
        self.queue = None;
        self.finished.clear();
        for id in self.at_disk.drain(..) {
            self.cx.slab.put(id);
        }
        let mut setup = self.driver.setup(PACKED);
        setup.base = INITIAL_BASE;
        self.start(setup);
        let taken = self.taken.clone();
        let (queue, _) = self.queue();
        assert_eq!(queue.inherited(), taken.len());
        while self.at_disk.len() < taken.len() {
            self.pop(1);
        }
        let again: Vec<u16> = self
            .at_disk
            .iter()
            .map(|id| self.cx.slab[*id].tag)
            .collect();
        assert_eq!(again, taken, "in the same order");
    }

    fn drain(&mut self) {
        while !self.at_disk.is_empty() {
            self.finish(0);
        }
        self.publish();
    }

    fn restart(&mut self) {
        self.drain();
        let queue = self.queue.take().unwrap();
        let (setup, _) = queue.into_parts();
        assert_eq!(setup.base & 0xffff, setup.base >> 16, "nothing in flight");
        self.start(setup);
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Offer(segments, indirect) => self.offer(*segments, *indirect),
            Step::Pop(room) => self.pop(*room),
            Step::Finish(index) if !self.at_disk.is_empty() => {
                self.finish(index.index(self.at_disk.len()));
            }
            Step::Finish(_) => {}
            Step::Publish => self.publish(),
            Step::TakeUsed => self.take_used(),
            Step::Kill => self.kill(),
            Step::Restart => self.restart(),
        }
    }
}

fn position(size: u16) -> impl Strategy<Value = Position> {
    (0..size, any::<bool>()).prop_map(|(index, wrap)| Position { index, wrap })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn each_buffer_comes_back_once(
        (size, start) in (1..=MAX_SIZE).prop_flat_map(|size| (Just(size), position(size))),
        is_tracked in any::<bool>(),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut model = Model::new(size, start, is_tracked);
        steps.iter().for_each(|step| model.step(step));
        while !model.offered.is_empty() {
            model.pop(usize::MAX);
            model.drain();
        }
        model.drain();
        model.take_used();
        prop_assert_eq!(model.driver.room(), size);
        let end = model.driver.next_avail();
        prop_assert_eq!(model.queue().0.base(), Position::base(end, end));
    }
}

/// A queue of 8 entries with a driver.
struct Small {
    memory: TestMemory,
    driver: PackedDriver,
    queue: PackedBlkQueue,
    cx: Cx,
}

impl Small {
    fn new(features: u64) -> Small {
        Small::in_memory(memory(), features, None)
    }

    /// A queue with an in-flight region.
    fn tracked(features: u64) -> Small {
        let memory = memory();
        let region = region(&memory);
        Small::in_memory(memory, features, Some(region))
    }

    fn in_memory(memory: TestMemory, features: u64, region: Option<PackedInflight>) -> Small {
        memory.write(BUFFERS, &header(T_IN, 0));
        let driver = PackedDriver::new(&memory, RING, 8, features & RING_F_EVENT_IDX != 0);
        let guest = memory.guest().clone();
        let setup = driver.setup(features);
        let queue = PackedBlkQueue::new(setup, guest, None, region, Arc::new(device()));
        Small {
            driver,
            queue: queue.expect("a good queue"),
            cx: context(16),
            memory,
        }
    }

    fn read() -> [Buffer; 2] {
        [
            Buffer::readable(BUFFERS, 16),
            Buffer::writable(BUFFERS + 0x200, 513),
        ]
    }

    fn read_with_table(&mut self, id: u16) {
        self.driver.offer_indirect(id, TABLES, &Small::read());
    }

    /// Serves `n` reads in one batch. Returns whether the driver wants an interrupt.
    fn serve(&mut self, n: u16) -> bool {
        (0..n).for_each(|id| self.read_with_table(id));
        let (popped, _) = pop(&mut self.queue, &mut self.cx).unwrap();
        assert_eq!(popped.len(), usize::from(n));
        finish(&mut self.queue, &mut self.cx, &popped, 0);
        let wanted = self.queue.publish(&mut self.cx);
        while self.driver.take_used().is_some() {}
        wanted
    }

    /// Returns the error of a queue that the driver has broken.
    fn broken(&mut self) -> String {
        let error = pop(&mut self.queue, &mut self.cx).expect_err("broken");
        error.to_string()
    }
}

fn descriptor(buffer: Buffer, flags: u16) -> (Buffer, u16) {
    (buffer, flags)
}

#[test]
fn a_driver_that_breaks_a_packed_ring_stops_its_queue() {
    let [header, data] = Small::read();
    let mut s = Small::new(PACKED);
    s.driver.offer_descriptors(8, &[descriptor(header, 0)]);
    assert_eq!(
        s.broken(),
        "queue 0: the driver made a buffer with id 8 available, of 8"
    );
    let mut s = Small::new(PACKED);
    s.read_with_table(3);
    s.read_with_table(3);
    assert_eq!(
        s.broken(),
        "queue 0: the driver made buffer 3 available, which the device still has"
    );
    // A chain that goes around the whole ring.
    let mut s = Small::new(PACKED);
    s.driver.offer_descriptors(0, &[descriptor(header, 1); 8]);
    let overrun = "queue 0: the driver made more descriptors available than the queue's 8 entries";
    assert_eq!(s.broken(), overrun);
    // Descriptors that the device still has, once more.
    let mut s = Small::new(PACKED);
    (0..4).for_each(|id| s.driver.offer(id, &Small::read()));
    pop(&mut s.queue, &mut s.cx).unwrap();
    s.driver.offer(4, &[header, data]);
    assert_eq!(s.broken(), overrun);
    let mut s = Small::new(PACKED);
    (0..8).for_each(|id| s.read_with_table(id));
    pop(&mut s.queue, &mut s.cx).unwrap();
    s.read_with_table(0);
    assert_eq!(s.broken(), overrun);
}

/// The successor reports what the driver did, and not a damaged region.
#[test]
fn a_broken_packed_ring_leaves_its_region_in_order() {
    let [header, data] = Small::read();
    let breaks: [&[(Buffer, u16)]; 3] = [
        &[(header, 1), (data, 2)],
        &[(header, 1); 8],
        &[(header, 1), (header, 1), (data, 2)],
    ];
    for (id, chain) in [8, 0, 1].into_iter().zip(breaks) {
        let mut s = Small::tracked(PACKED);
        s.driver.offer(1, &Small::read());
        let (popped, _) = pop(&mut s.queue, &mut s.cx).unwrap();
        s.driver.offer_descriptors(id, chain);
        let error = s.broken();
        finish(&mut s.queue, &mut s.cx, &popped, 0);
        s.queue.publish(&mut s.cx);
        let mut setup = s.driver.setup(PACKED);
        setup.base = INITIAL_BASE;
        let region = Some(region(&s.memory));
        let guest = s.memory.guest().clone();
        let successor = PackedBlkQueue::new(setup, guest, None, region, Arc::new(device()));
        s.queue = successor.expect("a sound region");
        assert_eq!(s.queue.inherited(), 0);
        if id == 8 {
            assert_eq!(s.broken(), error);
        }
    }
}

#[test]
fn chains_that_packed_rings_cannot_have_come_back_untouched() {
    let [header, data] = Small::read();
    let table = Buffer::readable(TABLES, 32);
    type Build = Box<dyn Fn(&mut Small)>;
    let direct = |chain: Vec<(Buffer, u16)>| -> Build {
        Box::new(move |s: &mut Small| s.driver.offer_descriptors(2, &chain))
    };
    let cases: [(&str, Build); 7] = [
        ("no status", direct(vec![(header, 0)])),
        (
            "a table with a successor",
            direct(vec![(table, 5), (data, 2)]),
        ),
        (
            "a table after a descriptor",
            direct(vec![(header, 1), (table, 4)]),
        ),
        (
            "an empty table",
            direct(vec![(Buffer::readable(TABLES, 0), 4)]),
        ),
        (
            "a table and a bit",
            direct(vec![(Buffer::readable(TABLES, 33), 4)]),
        ),
        (
            "a huge table",
            direct(vec![(Buffer::readable(TABLES, 1025 * 16), 4)]),
        ),
        (
            "a table outside memory",
            direct(vec![(Buffer::readable(1 << 40, 32), 4)]),
        ),
    ];
    for (name, build) in cases {
        let mut s = Small::new(PACKED);
        s.driver.put(TABLES, 0, header, 0, 0);
        s.driver.put(TABLES, 1, data, 0, 2);
        build(&mut s);
        let (popped, answered) = pop(&mut s.queue, &mut s.cx).unwrap();
        assert_eq!((popped.len(), answered), (0, 1), "{name}");
        s.queue.publish(&mut s.cx);
        assert_eq!(s.driver.take_used(), Some((2, 0)), "{name}");
        assert_eq!(s.driver.room(), 8);
    }
}

/// The order of a table is its own: the flags next and indirect, and the ids, have no meaning.
#[test]
fn only_the_write_flag_counts_in_a_table() {
    let [header, data] = Small::read();
    for at in [TABLES, TABLES + 8, TABLES + 1] {
        let mut s = Small::new(PACKED);
        s.driver.put(at, 0, header, 77, 4);
        s.driver.put(at, 1, data, 0xffff, 7);
        s.driver
            .offer_descriptors(5, &[(Buffer::readable(at, 32), 4 | 2)]);
        let (popped, _) = pop(&mut s.queue, &mut s.cx).unwrap();
        assert_eq!(popped.len(), 1, "{at:#x}");
        finish(&mut s.queue, &mut s.cx, &popped, 0);
        s.queue.publish(&mut s.cx);
        assert_eq!(s.driver.take_used(), Some((5, 513)));
    }
    let mut s = Small::new(PACKED & !RING_F_INDIRECT_DESC);
    s.read_with_table(0);
    assert_eq!(pop(&mut s.queue, &mut s.cx).unwrap().1, 1, "not negotiated");
}

#[test]
fn an_interrupt_is_sent_when_its_position_is_passed() {
    let mut s = Small::new(PACKED);
    let mut at = |n: u16, wish: Wish| {
        s.driver.wish(wish);
        s.serve(n)
    };
    let position = |index, wrap| Wish::At(Position { index, wrap });
    assert!(at(1, Wish::Always));
    assert!(!at(1, Wish::Never));
    // Positions 2 to 4 are used.
    assert!(at(3, position(3, true)));
    assert!(!at(1, position(3, true)));
    // 6, 7 and, in the next lap, 0.
    assert!(at(3, position(7, true)));
    assert!(!at(2, position(7, true)));
    assert!(!at(1, position(3, true)), "of the previous lap");
    assert!(at(1, position(4, false)));
    // 5, 6, 7 and 0.
    assert!(at(4, position(0, true)));
    assert!(!at(1, position(0, false)));
    assert!(!s.queue.publish(&mut s.cx), "nothing new");
}

#[test]
fn without_event_idx_flags_decide() {
    let mut s = Small::new(PACKED & !RING_F_EVENT_IDX);
    assert!(s.serve(1));
    assert!(!s.queue.publish(&mut s.cx), "nothing new");
    s.driver.wish(Wish::Never);
    assert!(!s.serve(3));
    s.driver.wish(Wish::Always);
    assert!(!s.queue.arm());
    s.read_with_table(0);
    assert!(s.driver.publish());
    assert!(s.queue.arm(), "came in before");
    s.queue.disarm();
    s.read_with_table(1);
    assert!(!s.driver.publish());
}

#[test]
fn a_kick_is_asked_for_by_position() {
    let mut s = Small::new(PACKED);
    for n in [5, 3, 7, 4] {
        assert!(!s.queue.arm());
        s.read_with_table(0);
        assert!(s.driver.publish(), "armed");
        s.read_with_table(1);
        assert!(!s.driver.publish(), "one kick is enough");
        assert!(s.queue.arm(), "came in before");
        let (popped, _) = pop(&mut s.queue, &mut s.cx).unwrap();
        s.queue.disarm();
        finish(&mut s.queue, &mut s.cx, &popped, 0);
        s.queue.publish(&mut s.cx);
        while s.driver.take_used().is_some() {}
        for _ in 0..n {
            s.serve(1);
            assert!(!s.driver.publish(), "disarmed");
        }
    }
}

#[test]
fn a_batch_appears_at_once_or_not_at_all() {
    let mut s = Small::new(PACKED);
    (0..6).for_each(|id| s.read_with_table(id));
    let (popped, _) = pop(&mut s.queue, &mut s.cx).unwrap();
    finish(&mut s.queue, &mut s.cx, &[popped[4], popped[1]], 0);
    assert_eq!(s.driver.take_used(), None);
    s.queue.publish(&mut s.cx);
    assert_eq!(s.driver.take_used(), Some((4, 513)));
    assert_eq!(s.driver.take_used(), Some((1, 513)));
    assert_eq!(s.driver.take_used(), None);
}

#[test]
fn a_successor_signals_what_may_have_been_lost() {
    let s = Small::new(PACKED);
    let (setup, _) = s.queue.into_parts();
    assert_eq!(signalled(setup.call.as_ref().unwrap()), None, "a new ring");
    let mut setup = s.driver.setup(PACKED);
    setup.base = 0x8003_8003;
    let call = setup.call.as_ref().unwrap().try_clone().unwrap();
    let guest = s.memory.guest().clone();
    PackedBlkQueue::new(setup, guest, None, None, Arc::new(device())).unwrap();
    assert_eq!(signalled(&call), Some(1));
}

#[test]
fn packed_rings_that_cannot_be_are_refused() {
    let s = Small::new(PACKED);
    let attempt = |change: &dyn Fn(&mut QueueSetup)| {
        let mut setup = s.driver.setup(PACKED);
        change(&mut setup);
        let memory = s.memory.guest().clone();
        match PackedBlkQueue::new(setup, memory, None, None, Arc::new(device())) {
            Err(QueueError::Ring { source, .. }) => source,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("accepted"),
        }
    };
    for size in [0, 1025, 0x8000] {
        assert_eq!(attempt(&|s| s.size = size), RingError::PackedSize(size));
    }
    for base in [0x8000_8008, 0x8008_8000, 0x8004_8003, 0x8001_0002, u32::MAX] {
        let error = RingError::Base { base, size: 8 };
        assert_eq!(attempt(&|s| s.base = base), error, "{base:#x}");
    }
    let misaligned: [fn(&mut QueueSetup); 3] = [
        |s| s.desc_addr += 8,
        |s| s.avail_addr += 2,
        |s| s.used_addr += 1,
    ];
    for change in misaligned {
        assert!(matches!(attempt(&change), RingError::Alignment { .. }));
    }
    let outside: [fn(&mut QueueSetup); 3] = [
        |s| s.desc_addr += 0x8_0000 - RING - 0x70,
        |s| s.avail_addr = 0,
        |s| s.used_addr = u64::MAX - 3,
    ];
    for change in outside {
        assert!(matches!(attempt(&change), RingError::Outside { .. }));
    }
}
