//! Who is told of what, and when; and what the dirty log gets to know.

use super::fixture::*;
use crate::features::RING_F_EVENT_IDX;
use crate::request::{T_GET_ID, T_IN, T_OUT};
use crate::testing::{Buffer, Driver, TestMemory, context, device, disk, finish, pop, signalled};
use crate::{BlkQueue, DirtyLog};
use fathom_core::Source;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

fn read_chain() -> [Buffer; 3] {
    [
        Buffer::readable(HEADER, 16),
        Buffer::writable(DATA, 512),
        Buffer::writable(STATUS, 1),
    ]
}

/// Serve `n` requests in one batch; whether the driver is to be told.
fn serve(f: &mut Fixture, n: u16) -> bool {
    f.driver.put_indirect(0, TABLE, &read_chain());
    (0..n).for_each(|_| f.driver.offer(0));
    f.driver.publish();
    let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
    assert_eq!(popped.len(), usize::from(n));
    finish(&mut f.queue, &mut f.cx, &popped, 0);
    f.queue.publish()
}

#[test]
fn without_event_idx_the_flags_rule() {
    let mut f = Fixture::new(disk(), FEATURES & !RING_F_EVENT_IDX);
    assert!(serve(&mut f, 1));
    assert!(!f.queue.publish(), "nothing new");
    f.driver.set_interrupts(false);
    assert!(!serve(&mut f, 3));
    f.driver.set_interrupts(true);
    assert!(serve(&mut f, 2));

    assert!(!f.queue.arm());
    assert!(f.driver.kicks_wanted());
    f.queue.disarm();
    assert!(!f.driver.kicks_wanted());
    f.driver.offer(0);
    f.driver.publish();
    assert!(f.queue.arm(), "came in before");
}

#[test]
fn with_event_idx_an_interrupt_is_sent_when_its_index_is_passed() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.driver.set_interrupts(false);
    // (requests, used_event, interrupt), the used index counting from 0.
    let steps = [
        (1, 0, true),
        (1, 0, false),
        (3, 3, true),
        (3, 8, false),
        (1, 8, true),
        (4, 8, false),
        (2, 14, true),
    ];
    for (n, event, expected) in steps {
        f.driver.set_used_event(event);
        assert_eq!(serve(&mut f, n), expected, "{n} more, event {event}");
    }
    assert!(!f.queue.publish(), "nothing new");
}

#[test]
fn with_event_idx_a_kick_is_asked_for_by_index() {
    let mut f = Fixture::new(disk(), FEATURES);
    serve(&mut f, 5);
    assert!(!f.queue.arm());
    assert_eq!(f.driver.avail_event(), 5);
    f.driver.offer(0);
    assert!(f.driver.publish(), "armed");
    assert!(f.queue.arm(), "came in before");
    f.queue.disarm();
    for _ in 0..100 {
        f.driver.offer(0);
        assert!(!f.driver.publish(), "disarmed");
        let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
        finish(&mut f.queue, &mut f.cx, &popped, 0);
    }
}

#[test]
fn notify_signals_the_call_eventfd() {
    let mut f = Fixture::new(disk(), FEATURES);
    f.queue.notify();
    f.queue.notify();
    let (setup, _) = f.queue.into_parts();
    assert_eq!(signalled(setup.call.as_ref().unwrap()), Some(2));
    assert_eq!(signalled(&setup.kick), None);
}

/// Driver and device each sleep whenever they have nothing to do, and only
/// the other's notification wakes them: one that is lost ends the test.
#[test]
fn no_notification_is_lost_between_two_threads() {
    for features in [FEATURES, FEATURES & !RING_F_EVENT_IDX] {
        sleep_and_wake(features);
    }
}

const REQUESTS: u32 = 20_000;

fn sleep_and_wake(features: u64) {
    let event_idx = features & RING_F_EVENT_IDX != 0;
    let memory = TestMemory::new(&REGIONS);
    memory.write(HEADER, &header(T_IN, 0));
    let driver = Driver::new(&memory, RINGS, 16, event_idx);
    driver.put_indirect(0, TABLE, &read_chain());
    driver.put_indirect(1, TABLE, &read_chain());
    let setup = driver.setup(features);
    let kick = setup.kick.try_clone().unwrap();
    let call = setup.call.as_ref().unwrap().try_clone().unwrap();
    let guest = memory.guest().clone();
    let queue = BlkQueue::new(setup, guest, None, None, Arc::new(device())).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let server = {
        let (kick, done) = (kick.try_clone().unwrap(), done.clone());
        std::thread::spawn(move || serve_and_sleep(queue, &kick, &done))
    };
    let mut driver = driver;
    let mut answered = 0;
    let mut offered = 0;
    while answered < REQUESTS {
        // One or two at a time.
        let more = 1 + offered % 2;
        (0..more).for_each(|head| driver.offer(head as u16));
        offered += more;
        if driver.publish() {
            rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        }
        loop {
            while driver.take_used().is_some() {
                answered += 1;
            }
            if answered == offered {
                break;
            }
            // Linux's virtqueue_enable_cb: ask, then look again.
            driver.set_used_event(driver.next_used());
            std::sync::atomic::fence(Ordering::SeqCst);
            if driver.used_idx() == driver.next_used() {
                assert!(wait(&call), "an interrupt was lost at {answered}");
            }
        }
    }
    done.store(true, Ordering::Release);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    server.join().unwrap();
}

fn serve_and_sleep(mut queue: BlkQueue, kick: &std::os::fd::OwnedFd, done: &AtomicBool) {
    let mut cx = context(16);
    while !done.load(Ordering::Acquire) {
        queue.disarm();
        let (popped, _) = pop(&mut queue, &mut cx).unwrap();
        if !popped.is_empty() {
            finish(&mut queue, &mut cx, &popped, 0);
            if queue.publish() {
                queue.notify();
            }
        } else if !queue.arm() {
            assert!(wait(kick), "a kick was lost");
        }
    }
}

/// Wait for an eventfd; false when that takes absurdly long.
fn wait(event: &std::os::fd::OwnedFd) -> bool {
    let mut poll = libc::pollfd {
        fd: std::os::fd::AsRawFd::as_raw_fd(event),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one pollfd.
    let ready = unsafe { libc::poll(&mut poll, 1, 60_000) };
    signalled(event);
    ready == 1
}

/// A log over all of the fixture's memory.
fn log() -> (Arc<Vec<AtomicU8>>, Arc<DirtyLog>) {
    let bytes: Arc<Vec<AtomicU8>> = Arc::new((0..0x1001).map(|_| AtomicU8::new(0)).collect());
    let base = NonNull::new(bytes.as_ptr() as *mut u8).unwrap();
    // SAFETY: atomics that `owner` keeps.
    let log = unsafe { DirtyLog::new(base, bytes.len(), bytes.clone()) };
    (bytes, Arc::new(log))
}

/// The pages that a request dirties, when its used ring is logged or not.
fn dirtied(kind: u32, log_used: bool, buffers: &[Buffer], errno: i32) -> Vec<u64> {
    let mut f = Fixture::new(disk(), FEATURES);
    let (bytes, log) = log();
    let mut setup = f.driver.setup(FEATURES);
    setup.log_addr = log_used.then_some(f.driver.used_gpa());
    let guest = f.memory.guest().clone();
    f.queue = BlkQueue::new(setup, guest, Some(log), None, f.device.clone()).unwrap();
    f.header(kind, 0);
    f.offer(true, buffers);
    let (popped, _) = pop(&mut f.queue, &mut f.cx).unwrap();
    finish(&mut f.queue, &mut f.cx, &popped, errno);
    f.queue.publish();
    let bit = |page: &u64| {
        let byte = bytes[*page as usize / 8].load(Ordering::Relaxed);
        byte >> (page % 8) & 1 == 1
    };
    (0..0x8000).filter(bit).collect()
}

#[test]
fn the_dirty_log_names_every_page_that_was_written() {
    let (data, status, seam) = (DATA >> 12, STATUS >> 12, SEAM >> 12);
    let used = RINGS >> 12;
    let h = Buffer::readable(HEADER, 16);
    let s = Buffer::writable(STATUS, 1);
    let read = [h, Buffer::writable(DATA + 4000, 1024), s];
    let across = [h, Buffer::writable(SEAM - 4096, 8192), s];
    let write = [h, Buffer::readable(DATA, 512), s];
    let id = [h, Buffer::writable(DATA + 4090, 20), s];
    assert_eq!(
        dirtied(T_IN, true, &read, 0),
        [used, data, data + 1, status]
    );
    assert_eq!(dirtied(T_IN, false, &read, 0), [data, data + 1, status]);
    let failed = dirtied(T_IN, false, &read, libc::EIO);
    assert_eq!(failed, [data, data + 1, status], "it may have written");
    assert_eq!(
        dirtied(T_IN, true, &across, 0),
        [used, status, seam - 1, seam]
    );
    assert_eq!(dirtied(T_OUT, true, &write, 0), [used, status]);
    assert_eq!(
        dirtied(T_GET_ID, true, &id, 0),
        [used, data, data + 1, status]
    );
    assert_eq!(dirtied(99, false, &write, 0), [status]);
}

#[test]
fn the_dirty_log_follows_the_used_ring_across_pages() {
    let mut f = Fixture::with_size(disk(), FEATURES, 1024);
    let (bytes, log) = log();
    let mut setup = f.driver.setup(FEATURES);
    // The used ring's 8 KiB, as if it began with a page.
    setup.log_addr = Some(0x10_0000);
    let guest = f.memory.guest().clone();
    f.queue = BlkQueue::new(setup, guest, Some(log), None, f.device.clone()).unwrap();
    f.header(T_IN, 0);
    let page = |i: usize| bytes[0x100 / 8].swap(0, Ordering::Relaxed) >> i & 1 == 1;
    for _ in 0..511 {
        serve(&mut f, 1);
    }
    bytes[0x100 / 8].store(0, Ordering::Relaxed);
    serve(&mut f, 1);
    assert_eq!(
        bytes[0x100 / 8].load(Ordering::Relaxed),
        0b11,
        "element 511 straddles"
    );
    bytes[0x100 / 8].store(0, Ordering::Relaxed);
    serve(&mut f, 1);
    assert_eq!(
        bytes[0x100 / 8].load(Ordering::Relaxed),
        0b11,
        "the index is on the first"
    );
    f.queue.arm();
    assert!(page(2), "avail_event is at the end");
}

#[test]
fn a_log_that_does_not_cover_the_used_ring_is_refused() {
    let f = Fixture::new(disk(), FEATURES);
    for addr in [0x1001 * 8 * 4096 - 100, u64::MAX - 10] {
        let mut setup = f.driver.setup(FEATURES);
        setup.log_addr = Some(addr);
        let guest = f.memory.guest().clone();
        let queue = BlkQueue::new(setup, guest, Some(log().1), None, f.device.clone());
        assert!(
            matches!(queue, Err(crate::QueueError::Log { .. })),
            "{addr:#x}"
        );
    }
}
