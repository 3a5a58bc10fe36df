//! Compares with the `virtio-queue` crate: on the same memory, both find the same buffers and make
//! the same decisions.

use crate::BlkQueue;
use crate::chain::{Chain, ChainContext, TableCopy, Unusable};
use crate::features::RING_F_INDIRECT_DESC;
use crate::memory::RegionCache;
use crate::queue::{RingAddresses, SplitQueue};
use crate::testing::{Buffer, Driver, TestMemory, context, device, finish, pop};
use fathom_core::Op;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::sync::Arc;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

const SIZE: u16 = 16;
const RINGS: u64 = 0x1000;
const TABLES: u64 = 0x2000;
const SEAM: u64 = 0x3000;
const END: u64 = 0x4000;
const REGIONS: [(u64, u64); 2] = [(0, SEAM), (SEAM, END - SEAM)];

const NEXT: u16 = 1;
const INDIRECT: u16 = 4;

/// Returns a view of `memory` for `virtio-queue`.
fn view(memory: &TestMemory) -> GuestMemoryMmap<()> {
    let regions = REGIONS.map(|(gpa, len)| {
        let (host, prot) = (
            memory.at(gpa, len as usize),
            libc::PROT_READ | libc::PROT_WRITE,
        );
        let builder = MmapRegionBuilder::new(len as usize)
            .with_mmap_prot(prot)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: a mapping that `memory` keeps.
        let region = unsafe { builder.with_raw_mmap_pointer(host) }
            .build()
            .unwrap();
        GuestRegionMmap::new(region, GuestAddress(gpa)).unwrap()
    });
    GuestMemoryMmap::from_regions(regions.into()).unwrap()
}

fn oracle_queue(driver: &Driver, start: u16) -> Queue {
    let mut queue = Queue::new(SIZE).unwrap();
    queue
        .try_set_desc_table_address(GuestAddress(driver.desc_gpa()))
        .unwrap();
    queue
        .try_set_avail_ring_address(GuestAddress(driver.avail_gpa()))
        .unwrap();
    queue
        .try_set_used_ring_address(GuestAddress(driver.used_gpa()))
        .unwrap();
    queue.set_next_avail(start);
    queue.set_next_used(start);
    queue.set_event_idx(true);
    queue.set_ready(true);
    queue
}

fn our_queue(memory: &TestMemory, driver: &Driver, start: u16) -> SplitQueue {
    let at = RingAddresses {
        desc: driver.desc_gpa() + TestMemory::USER_OFFSET,
        avail: driver.avail_gpa() + TestMemory::USER_OFFSET,
        used: driver.used_gpa() + TestMemory::USER_OFFSET,
    };
    // SAFETY: the callers keep the memory.
    unsafe { SplitQueue::new(memory.guest(), at, SIZE, start, true) }.unwrap()
}

/// Returns the chain's buffers according to this crate.
fn our_buffers(
    memory: &TestMemory,
    queue: &SplitQueue,
    head: u16,
) -> Result<Vec<Buffer>, Unusable> {
    let mut cx = ChainContext {
        queue,
        memory: memory.guest(),
        cache: &mut RegionCache::default(),
        copy: &mut TableCopy::default(),
        indirect: true,
    };
    let (mut chain, first) = Chain::begin(&mut cx, queue.first_descriptor(head))?;
    let (mut current, mut buffers) = (Some(first), Vec::new());
    while let Some(descriptor) = current {
        buffers.push(Buffer {
            gpa: descriptor.addr(),
            len: descriptor.len(),
            writable: descriptor.is_writable(),
        });
        current = chain.after(&mut cx, descriptor)?;
    }
    Ok(buffers)
}

/// Returns the oracle's buffers; none if the oracle stopped before the end of the chain.
fn their_buffers(memory: &GuestMemoryMmap<()>, queue: &mut Queue) -> Option<Vec<Buffer>> {
    let chain = queue.iter(memory).unwrap().next().expect("a head");
    let mut ended = false;
    let buffers = chain
        .inspect(|descriptor| ended = !descriptor.has_next())
        .map(|descriptor| Buffer {
            gpa: descriptor.addr().0,
            len: descriptor.len(),
            writable: descriptor.is_write_only(),
        })
        .collect();
    ended.then_some(buffers)
}

#[derive(Clone, Debug)]
struct Entry {
    gpa: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// Generates one descriptor: mostly a link in a chain, sometimes a reference to a table, sometimes
/// nonsense.
fn entry() -> impl Strategy<Value = Entry> {
    let link = (0..END, 1u32..4096, 0u16..4, 0..SIZE);
    let table =
        (0u64..0x1f00, 0u32..20, 0u16..4, 0..SIZE).prop_map(|(at, entries, flags, next)| {
            (
                TABLES + (at & !7),
                entries * 16,
                INDIRECT | (flags & 2),
                next,
            )
        });
    let nonsense = (any::<u64>(), any::<u32>(), any::<u16>(), any::<u16>());
    prop_oneof![12 => link, 4 => table, 1 => nonsense].prop_map(|(gpa, len, flags, next)| Entry {
        gpa,
        len,
        flags,
        next,
    })
}

/// Generates entries that mostly lead to the next one.
fn table(entries: usize) -> impl Strategy<Value = Vec<Entry>> {
    prop::collection::vec((entry(), any::<u8>()), entries).prop_map(|entries| {
        let link = |(i, (mut entry, chance)): (usize, (Entry, u8))| {
            if chance < 220 {
                entry.next = i as u16 + 1;
            }
            if chance < 200 && entry.flags & INDIRECT == 0 {
                entry.flags |= NEXT;
            }
            entry
        };
        entries.into_iter().enumerate().map(link).collect()
    })
}

fn put(driver: &Driver, table: u64, entries: &[Entry]) {
    for (i, entry) in entries.iter().enumerate() {
        let buffer = Buffer::readable(entry.gpa, entry.len);
        driver.put(table, i as u16, buffer, entry.flags, entry.next);
    }
}

/// Returns whether the chain goes through a table that only the oracle accepts: one that is not
/// entirely in memory, has a successor, or is huge.
fn is_strict_about(direct: &[Entry], head: u16) -> bool {
    let mut at = usize::from(head);
    for _ in 0..SIZE {
        let entry = &direct[at];
        if entry.flags & INDIRECT != 0 {
            let end = entry.gpa.checked_add(entry.len.into());
            let fits = end.is_some_and(|end| end <= END);
            return !fits || entry.flags & NEXT != 0 || entry.len > 16 * 1024;
        }
        at = usize::from(entry.next);
    }
    false
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn chains_have_the_same_buffers(
        direct in table(SIZE.into()),
        indirect in table(64),
        head in 0..SIZE,
    ) {
        let memory = TestMemory::new(&REGIONS);
        let mut driver = Driver::new(&memory, RINGS, SIZE, true);
        put(&driver, driver.desc_gpa(), &direct);
        put(&driver, TABLES, &indirect);
        driver.offer(head);
        driver.publish();
        let ours = our_buffers(&memory, &our_queue(&memory, &driver, 0), head);
        let theirs = their_buffers(&view(&memory), &mut oracle_queue(&driver, 0));
        match (ours, theirs) {
            (Ok(ours), Some(theirs)) => prop_assert_eq!(ours, theirs),
            (Err(Unusable), None) => {}
            (Err(Unusable), Some(theirs)) => {
                prop_assert!(is_strict_about(&direct, head), "we refuse {theirs:?}");
            }
            (Ok(ours), None) => {
                // The oracle stops at 4 GiB; this crate's parser rejects such requests later.
                let total: u64 = ours.iter().map(|buffer| u64::from(buffer.len)).sum();
                prop_assert!(total > u32::MAX.into(), "they refuse {ours:?}");
            }
        }
    }
}

/// A step of the driver or the device.
#[derive(Clone, Debug)]
enum Step {
    Offer(u16),
    Pop,
    Use,
    Publish,
    UsedEvent(i16),
    Arm,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1u16..5).prop_map(Step::Offer),
        3 => Just(Step::Pop),
        4 => Just(Step::Use),
        3 => Just(Step::Publish),
        2 => (-3i16..8).prop_map(Step::UsedEvent),
        2 => Just(Step::Arm),
    ]
}

/// The same ring twice, for this crate and for the oracle.
struct Twins {
    ours: (TestMemory, Driver, SplitQueue),
    theirs: (TestMemory, Driver, Queue),
    view: GuestMemoryMmap<()>,
    popped: Vec<u16>,
    outstanding: u16,
}

impl Twins {
    fn new(start: u16) -> Twins {
        let ring = || {
            let memory = TestMemory::new(&REGIONS);
            let mut driver = Driver::new(&memory, RINGS, SIZE, true);
            driver.start_at(start);
            driver.set_used_event(start);
            (memory, driver)
        };
        let ((memory, driver), (their_memory, their_driver)) = (ring(), ring());
        let queue = our_queue(&memory, &driver, start);
        let their_queue = oracle_queue(&their_driver, start);
        Twins {
            view: view(&their_memory),
            ours: (memory, driver, queue),
            theirs: (their_memory, their_driver, their_queue),
            popped: Vec::new(),
            outstanding: 0,
        }
    }

    fn step(&mut self, step: &Step) {
        let (_, driver, queue) = &mut self.ours;
        let (_, their_driver, oracle) = &mut self.theirs;
        match *step {
            Step::Offer(n) => {
                for _ in 0..n.min(SIZE - self.outstanding) {
                    let head = self.outstanding;
                    driver.offer(head);
                    their_driver.offer(head);
                    self.outstanding += 1;
                }
                assert_eq!(driver.publish(), their_driver.publish(), "kick");
            }
            Step::Pop => {
                let n = queue.available().unwrap();
                let mut heads: Vec<u16> = (0..n).map(|_| queue.pop().unwrap()).collect();
                let chains = oracle.iter(&self.view).unwrap();
                let theirs: Vec<u16> = chains.map(|chain| chain.head_index()).collect();
                assert_eq!(heads, theirs);
                self.popped.append(&mut heads);
            }
            Step::Use => {
                if let Some(head) = self.popped.pop() {
                    queue.push_used(head, u32::from(head) + 1);
                    oracle
                        .add_used(&self.view, head, u32::from(head) + 1)
                        .unwrap();
                    self.outstanding -= 1;
                }
            }
            Step::Publish => {
                queue.publish();
                let wanted = oracle.needs_notification(&self.view).unwrap();
                assert_eq!(queue.needs_call(), wanted, "call");
            }
            Step::UsedEvent(offset) => {
                let event = driver.used_idx().wrapping_add_signed(offset);
                driver.set_used_event(event);
                their_driver.set_used_event(event);
            }
            Step::Arm => {
                let theirs = oracle.enable_notification(&self.view).unwrap();
                assert_eq!(queue.enable_kicks(), theirs, "work before sleeping");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn rings_come_to_the_same_decisions(
        start in prop_oneof![Just(0u16), Just(65530), any::<u16>()],
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let mut twins = Twins::new(start);
        steps.iter().for_each(|step| twins.step(step));
        twins.step(&Step::Publish);
        let len = Driver::ring_bytes(SIZE) as usize;
        let (ours, theirs) = (twins.ours.0.read(RINGS, len), twins.theirs.0.read(RINGS, len));
        prop_assert_eq!(ours, theirs, "the rings as the driver sees them");
    }
}

/// Cuts `total` bytes into buffers at `places`, and lays them out from `gpa` on with gaps.
fn cut(total: u32, places: &[u32], mut gpa: u64, writable: bool) -> Vec<Buffer> {
    let mut ends: Vec<u32> = places.iter().map(|place| place % total).collect();
    ends.extend([0, total]);
    ends.sort_unstable();
    ends.dedup();
    let buffer = |ends: &[u32]| {
        let len = ends[1] - ends[0];
        let at = gpa;
        gpa += u64::from(len) + u64::from(len % 7);
        Buffer {
            gpa: at,
            len,
            writable,
        }
    };
    ends.windows(2).map(buffer).collect()
}

/// Returns the byte that the disk contains at `i`.
fn pattern(i: usize) -> u8 {
    (i * 7 + i / 256) as u8 | 1
}

/// Executes a request on `memory` with the oracle's reader and writer. Returns the data written to
/// the disk.
fn their_request(memory: &TestMemory, queue: &mut Queue) -> Vec<u8> {
    let view = view(memory);
    let chain = queue.iter(&view).unwrap().next().expect("a head");
    let mut reader = chain.clone().reader(&view).unwrap();
    let mut writer = chain.writer(&view).unwrap();
    let mut header = [0; 16];
    reader.read_exact(&mut header).unwrap();
    let mut written = Vec::new();
    reader.read_to_end(&mut written).unwrap();
    let len = writer.available_bytes() - 1;
    let data: Vec<u8> = (0..len).map(pattern).collect();
    writer.write_all(&data).unwrap();
    writer.write_all(&[0]).unwrap();
    written
}

/// Executes the same request with this crate's queue.
fn our_request(f: &TestMemory, driver: &Driver) -> Vec<u8> {
    let setup = driver.setup(RING_F_INDIRECT_DESC);
    let device = Arc::new(device());
    let mut queue = BlkQueue::new(setup, f.guest().clone(), None, None, device).unwrap();
    let mut cx = context(SIZE.into());
    let (popped, answered) = pop(&mut queue, &mut cx).unwrap();
    assert_eq!((popped.len(), answered), (1, 0), "a good request");
    let request = &cx.slab[popped[0]];
    let segments = request.segments.iter();
    let bytes =
        segments.flat_map(|s| (0..s.iov_len).map(|i| s.iov_base.cast::<u8>().wrapping_add(i)));
    let mut written = Vec::new();
    for (i, byte) in bytes.enumerate() {
        // SAFETY: segments refer to guest memory.
        unsafe {
            match request.op {
                Op::Read => byte.write(pattern(i)),
                _ => written.push(byte.read()),
            }
        }
    }
    finish(&mut queue, &mut cx, &popped, 0);
    written
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn requests_move_the_same_bytes(
        write in any::<bool>(),
        sectors in 1u32..5,
        readable_cuts in prop::collection::vec(any::<u32>(), 0..4),
        writable_cuts in prop::collection::vec(any::<u32>(), 0..4),
        header_cuts in prop::collection::vec(0u32..17, 0..3),
        direct in any::<bool>(),
    ) {
        let data = sectors * 512;
        let (readable, writable) = if write { (16 + data, 1) } else { (16, data + 1) };
        let cuts = [readable_cuts, header_cuts].concat();
        // Both kinds of data may span the boundary of two regions.
        let mut chain = cut(readable, &cuts, SEAM - 1024, false);
        let end = chain.last().map_or(0, |last| last.gpa + u64::from(last.len));
        let writable_at = if write { end + 8 } else { SEAM - 900 };
        chain.extend(cut(writable, &writable_cuts, writable_at, true));
        let ring = || {
            let memory = TestMemory::new(&REGIONS);
            let mut driver = Driver::new(&memory, RINGS, SIZE, false);
            let mut content = [0; 16 + 2048];
            content[0] = u8::from(write);
            (16..content.len()).for_each(|i| content[i] = pattern(i));
            let mut content = content.iter();
            for buffer in chain.iter().filter(|buffer| !buffer.writable) {
                let bytes: Vec<u8> = content.by_ref().take(buffer.len as usize).copied().collect();
                memory.write(buffer.gpa, &bytes);
            }
            if direct {
                driver.put_direct(0, &chain);
            } else {
                driver.put_indirect(0, TABLES, &chain);
            }
            driver.offer(0);
            driver.publish();
            (memory, driver)
        };
        let ((ours, driver), (theirs, their_driver)) = (ring(), ring());
        let their_data = their_request(&theirs, &mut oracle_queue(&their_driver, 0));
        prop_assert_eq!(our_request(&ours, &driver), their_data, "written to the disk");
        let from = TABLES;
        let len = (END - from) as usize;
        prop_assert_eq!(ours.read(from, len), theirs.read(from, len), "written to the guest");
    }
}
