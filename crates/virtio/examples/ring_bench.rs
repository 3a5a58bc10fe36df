//! Measures the cost of the ring and the parser per request: `pop`, `finish` and `publish`, without
//! any I/O.
//!
//! `cargo run --release -p fathom-virtio --example ring_bench` runs the driver on the same thread,
//! so that all data is in the cache. With `cross`, the driver runs on another CPU, as in real use,
//! and the device has cache misses. With `inflight`, the queue also maintains an in-flight region.
//! With `packed`, the ring is packed. Only the device's share is measured. The result is the median
//! of the batches, so that other load on the machine has little effect.

use fathom_core::{Clock, Cx, RequestId, Source};
use fathom_virtio::features::{BLK_F_FLUSH, F_RING_PACKED, RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use fathom_virtio::testing::{Buffer, Driver, PackedDriver, TestMemory, Wish, context, device};
use fathom_virtio::{BlkQueue, InflightQueue, PackedBlkQueue, PackedInflight};
use fathom_virtio::{inflight, packed_inflight};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const SIZE: u16 = 256;
const RINGS: u64 = 0x1000;
const TABLES: u64 = 0x10_0000;
const HEADERS: u64 = 0x20_0000;
const DATA: u64 = 0x100_0000;
const INFLIGHT: u64 = 0x30_0000;
const MEMORY: u64 = 64 << 20;
const FEATURES: u64 = RING_F_INDIRECT_DESC | RING_F_EVENT_IDX | BLK_F_FLUSH;

/// Header and status of a request share a structure in Linux's driver; the table is a separate
/// allocation.
const HEADER_STRIDE: u64 = 256;
const TABLE_STRIDE: u64 = 64;
const DATA_LEN: u32 = 4096;

/// A driver of one layout of rings, with its memory.
trait Guest: Send + Sized + 'static {
    /// Creates a driver and its queue. If `tracked`, the queue has an in-flight region, as most
    /// front-ends request.
    fn start(tracked: bool) -> (Self, Box<dyn Source>);

    fn memory(&self) -> &TestMemory;

    /// Makes a chain available by an indirect table.
    fn offer(&mut self, head: u16, table: u64, chain: &[Buffer]);

    fn publish(&mut self);

    /// Returns whether a request was answered.
    fn take_used(&mut self) -> bool;

    /// Requests an interrupt for the next answer.
    fn rearm(&mut self);

    /// Does the driver's work for one request: header, table and ring.
    fn prepare(&mut self, head: u16, sector: u64) {
        let slot = u64::from(head);
        let header = HEADERS + slot * HEADER_STRIDE;
        // SAFETY: 16 mapped bytes.
        unsafe {
            let at = self.memory().at(header, 16).cast::<u64>();
            at.write_volatile(0);
            at.add(1).write_volatile(sector);
        }
        let chain = [
            Buffer::readable(header, 16),
            Buffer::writable(DATA + slot * u64::from(DATA_LEN), DATA_LEN),
            Buffer::writable(header + 16, 1),
        ];
        self.offer(head, TABLES + slot * TABLE_STRIDE, &chain);
    }
}

struct Split(TestMemory, Driver);

impl Guest for Split {
    fn start(tracked: bool) -> (Split, Box<dyn Source>) {
        let memory = TestMemory::new(&[(0, MEMORY)]);
        let driver = Driver::new(&memory, RINGS, SIZE, true);
        let guest = memory.guest().clone();
        let base = NonNull::new(memory.at(INFLIGHT, inflight::region_size(SIZE)));
        // SAFETY: a part of memory that is kept, and that no other code uses.
        let region = unsafe { InflightQueue::new(base.expect("mapped"), SIZE, guest.clone()) };
        let region = tracked.then_some(region);
        let queue = BlkQueue::new(driver.setup(FEATURES), guest, None, region, device().into());
        let queue = queue.expect("a good queue").into_source();
        (Split(memory, driver), queue)
    }

    fn memory(&self) -> &TestMemory {
        &self.0
    }

    fn offer(&mut self, head: u16, table: u64, chain: &[Buffer]) {
        self.1.put_indirect(head, table, chain);
        self.1.offer(head);
    }

    fn publish(&mut self) {
        self.1.publish();
    }

    fn take_used(&mut self) -> bool {
        self.1.take_used().is_some()
    }

    fn rearm(&mut self) {
        self.1.set_used_event(self.1.next_used());
    }
}

struct Packed(TestMemory, PackedDriver);

impl Guest for Packed {
    fn start(tracked: bool) -> (Packed, Box<dyn Source>) {
        let memory = TestMemory::new(&[(0, MEMORY)]);
        let driver = PackedDriver::new(&memory, RINGS, SIZE, true);
        let guest = memory.guest().clone();
        let base = NonNull::new(memory.at(INFLIGHT, packed_inflight::region_size(SIZE)));
        // SAFETY: a part of memory that is kept, and that no other code uses.
        let region = unsafe { PackedInflight::new(base.expect("mapped"), SIZE, guest.clone()) };
        let region = tracked.then_some(region);
        let setup = driver.setup(FEATURES | F_RING_PACKED);
        let queue = PackedBlkQueue::new(setup, guest, None, region, device().into());
        let queue = queue.expect("a good queue").into_source();
        (Packed(memory, driver), queue)
    }

    fn memory(&self) -> &TestMemory {
        &self.0
    }

    fn offer(&mut self, head: u16, table: u64, chain: &[Buffer]) {
        self.1.offer_indirect(head, table, chain);
    }

    fn publish(&mut self) {
        self.1.publish();
    }

    fn take_used(&mut self) -> bool {
        self.1.take_used().is_some()
    }

    fn rearm(&mut self) {
        self.1.wish(Wish::At(self.1.next_used()));
    }
}

/// The device and its measurements.
struct Device {
    queue: Box<dyn Source>,
    cx: Cx,
    popped: Vec<RequestId>,
    ticks: Vec<u64>,
}

impl Device {
    fn new(queue: Box<dyn Source>) -> Device {
        Device {
            queue,
            cx: context(usize::from(SIZE)),
            popped: Vec::with_capacity(usize::from(SIZE)),
            ticks: Vec::new(),
        }
    }

    /// Serves one batch.
    fn serve(&mut self, batch: u16) {
        let clock = Clock::get();
        let begin = clock.now();
        let room = usize::from(SIZE);
        let popped = self.queue.pop(&mut self.cx, room, &mut self.popped);
        for &id in &self.popped {
            self.queue.finish(&self.cx.slab[id]);
        }
        std::hint::black_box(self.queue.publish(&mut self.cx));
        self.ticks.push(clock.now() - begin);
        popped.expect("a sane driver");
        assert_eq!(self.popped.len(), usize::from(batch));
        self.popped.drain(..).for_each(|id| self.cx.slab.put(id));
    }

    /// Returns nanoseconds per request in the median batch, without the cost of reading the clock.
    fn median(mut self, batch: u16) -> f64 {
        let clock = Clock::get();
        let readings = (0..1000).map(|_| {
            let begin = clock.now();
            clock.now() - begin
        });
        let overhead = readings.min().expect("readings");
        self.ticks.sort_unstable();
        let median = self.ticks[self.ticks.len() / 2].saturating_sub(overhead);
        median as f64 * 1e9 / clock.hz() / f64::from(batch)
    }
}

fn same_thread<G: Guest>(tracked: bool, batch: u16, rounds: u32) -> f64 {
    let (mut driver, queue) = G::start(tracked);
    let mut device = Device::new(queue);
    for round in 0..rounds {
        (0..batch).for_each(|head| driver.prepare(head, u64::from(round % 1000)));
        driver.publish();
        device.serve(batch);
        while driver.take_used() {}
        driver.rearm();
    }
    device.median(batch)
}

/// The driver prepares its next batch when the last is answered, so the two never work at the same
/// time. The measurement shows the effect of the data's location.
fn cross_thread<G: Guest>(tracked: bool, batch: u16, rounds: u32) -> f64 {
    let (mut driver, queue) = G::start(tracked);
    // Number of batches that are complete: packed rings show their first chains earlier.
    let prepared = Arc::new(AtomicU32::new(0));
    let ready = prepared.clone();
    let guest = std::thread::spawn(move || {
        pin(1);
        for round in 0..rounds {
            (0..batch).for_each(|head| driver.prepare(head, u64::from(round % 1000)));
            driver.publish();
            ready.store(round + 1, Ordering::Release);
            let mut answered = 0;
            while answered < batch {
                match driver.take_used() {
                    true => answered += 1,
                    false => std::hint::spin_loop(),
                }
            }
            driver.rearm();
        }
    });
    pin(0);
    let mut device = Device::new(queue);
    for round in 0..rounds {
        while prepared.load(Ordering::Acquire) <= round {
            std::hint::spin_loop();
        }
        device.serve(batch);
    }
    guest.join().expect("the driver");
    device.median(batch)
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).expect("two CPUs");
}

/// `ring_bench [cross] [inflight] [packed] [REQUESTS]`
fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|arg| arg == name);
    let (cross, tracked, packed) = (has("cross"), has("inflight"), has("packed"));
    let requests = arguments.iter().find_map(|arg| arg.parse().ok());
    let requests: u32 = requests.unwrap_or(4_000_000);
    for batch in [1, 32, 128] {
        let rounds = requests / u32::from(batch);
        let ns = match (cross, packed) {
            (true, true) => cross_thread::<Packed>(tracked, batch, rounds / 10),
            (true, false) => cross_thread::<Split>(tracked, batch, rounds / 10),
            (false, true) => same_thread::<Packed>(tracked, batch, rounds),
            (false, false) => same_thread::<Split>(tracked, batch, rounds),
        };
        println!("batch {batch:>4}: {ns:6.1} ns a request");
    }
}
