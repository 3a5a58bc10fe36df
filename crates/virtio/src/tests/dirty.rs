//! Tests of which pages the dirty log records.

use super::fixture::*;
use crate::request::{T_GET_ID, T_IN, T_OUT};
use crate::testing::{Buffer, disk, finish, pop};
use crate::{BlkQueue, DirtyLog};
use fathom_core::Source;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Creates a log for all of the fixture's memory.
fn log() -> (Arc<Vec<AtomicU8>>, Arc<DirtyLog>) {
    let bytes: Arc<Vec<AtomicU8>> = Arc::new((0..0x1001).map(|_| AtomicU8::new(0)).collect());
    let base = NonNull::new(bytes.as_ptr() as *mut u8).unwrap();
    // SAFETY: atomics that `owner` keeps.
    let log = unsafe { DirtyLog::new(base, bytes.len(), bytes.clone()) };
    (bytes, Arc::new(log))
}

/// Returns the pages that a request dirties, with or without logging of the used ring.
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
    f.queue.publish(&mut f.cx);
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
    // Logs the used ring's 8 KiB as if the ring began at a page boundary.
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
    for _ in 513..1022 {
        serve(&mut f, 1);
    }
    bytes[0x100 / 8].store(0, Ordering::Relaxed);
    // Elements 1022, 1023, 0 and 1.
    serve(&mut f, 4);
    assert_eq!(
        bytes[0x100 / 8].load(Ordering::Relaxed),
        0b111,
        "all of a batch, around the end"
    );
    f.queue.arm();
    assert!(page(2), "avail_event is at the end");
    f.queue.disarm();
    assert!(page(2), "where kicks are suppressed, too");
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
