//! Tests of live migration: the dirty log, and the release of the disk.

use crate::support::guest::*;
use crate::support::raw::Raw;
use crate::support::served::Served;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion};

const PAGE: u64 = 4096;
const LOG_SIZE: u64 = (GPA + MEMORY_SIZE) / PAGE / 8;
const FEATURES: u64 = F_VERSION_1 | F_FLUSH | F_PROTOCOL;

struct Log(File);

impl Log {
    fn new() -> Log {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(LOG_SIZE).unwrap();
        Log(file)
    }

    fn region(&self, size: u64) -> Option<VhostUserDirtyLogRegion> {
        Some(VhostUserDirtyLogRegion {
            mmap_size: size,
            mmap_offset: 0,
            mmap_handle: self.0.as_raw_fd(),
        })
    }

    /// Returns the offsets in the guest's memory of the pages that were marked since the last call.
    fn take(&self) -> Vec<u64> {
        let mut bits = vec![0; LOG_SIZE as usize];
        self.0.read_exact_at(&mut bits, 0).unwrap();
        self.0.write_all_at(&vec![0; bits.len()], 0).unwrap();
        (0..LOG_SIZE * 8)
            .filter(|page| bits[*page as usize / 8] & 1 << (page % 8) != 0)
            .map(|page| page * PAGE - GPA)
            .collect()
    }
}

/// Starts logging while the queue runs, as QEMU does.
fn start_logging(frontend: &Frontend, queue: &Queue, log: &Log) {
    frontend.set_log_base(0, log.region(LOG_SIZE)).unwrap();
    frontend.set_features(FEATURES | F_LOG_ALL).unwrap();
    let addresses = queue.logged_addresses();
    frontend.set_vring_addr(queue.index, &addresses).unwrap();
}

#[test]
fn every_page_that_is_written_is_logged() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queue = Queue::new(&memory, 1);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 0);
    let log = Log::new();
    start_logging(&frontend, &queue, &log);
    log.take();
    let before = memory.contents();
    // Unaligned data across three pages.
    queue.offer(1, IN, 0, DATA + 8 * PAGE - 512, 8192);
    queue.offer(2, OUT, 64, DATA + 20 * PAGE, 512);
    queue.kick();
    queue.wait();
    assert_eq!((queue.status(1), queue.status(2)), (0, 0));
    // After the completion, the queue writes once more to the used ring: whether it wants kicks.
    frontend.get_vring_base(1).unwrap();
    let logged = log.take();
    let after = memory.contents();
    let differs = |page: &u64| {
        let range = *page as usize..(*page + PAGE) as usize;
        before[range.clone()] != after[range]
    };
    let headers = queue.offset() + 0xc000;
    let avail = queue.offset() + 0x4000;
    let descriptors = queue.offset();
    let by_driver = [descriptors, avail];
    let changed: Vec<u64> = (0..MEMORY_SIZE)
        .step_by(PAGE as usize)
        .filter(differs)
        .filter(|page| !by_driver.contains(page))
        .collect();
    assert!(changed.contains(&headers));
    for page in &changed {
        assert!(logged.contains(page), "{page:#x} is not in {logged:x?}");
    }
    for part in [7, 8, 9] {
        assert!(logged.contains(&(DATA + part * PAGE)));
    }
    assert!(!logged.contains(&(DATA + 20 * PAGE)));
}

#[test]
fn logging_begins_and_ends_with_its_feature() {
    let served = Served::new();
    let (_, mut frontend, mut queue) = served.guest();
    let log = Log::new();
    frontend.set_log_base(0, log.region(LOG_SIZE)).unwrap();
    queue.check_read(0, 0);
    assert!(log.take().is_empty());
    start_logging(&frontend, &queue, &log);
    queue.check_read(1, 1);
    assert!(!log.take().is_empty());
    // The migration is cancelled,
    frontend.set_features(FEATURES).unwrap();
    log.take();
    queue.check_read(2, 2);
    assert!(log.take().is_empty());
    // and starts again while the ring is stopped.
    assert_eq!(frontend.get_vring_base(0).unwrap(), 3);
    queue.start(&mut frontend, 3);
    start_logging(&frontend, &queue, &log);
    queue.check_read(3, 3);
    assert!(!log.take().is_empty());
}

#[test]
fn requests_in_flight_are_waited_for_when_logging_begins() {
    let served = Served::new();
    let (_, frontend, mut queue) = served.guest();
    served.hold_a_read(&mut queue, 0);
    let log = Log::new();
    let starter = std::thread::spawn({
        let frontend = frontend.clone();
        let region = log.region(LOG_SIZE).unwrap();
        move || {
            frontend.set_log_base(0, Some(region)).unwrap();
            frontend.set_features(FEATURES | F_LOG_ALL).unwrap();
        }
    });
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert!(!starter.is_finished());
    served.disk.release();
    starter.join().unwrap();
    assert_eq!(queue.used(), 1);
}

#[test]
fn a_log_that_does_not_cover_memory_ends_the_connection() {
    let served = Served::new();
    let memory = Memory::new();
    for (size, file) in [(LOG_SIZE - 1, LOG_SIZE), (LOG_SIZE, 0), (0, LOG_SIZE)] {
        let mut frontend = served.connect();
        negotiate(&mut frontend, &memory);
        let queue = Queue::new(&memory, 0);
        queue.start(&mut frontend, 0);
        let log = Log::new();
        log.0.set_len(file).unwrap();
        let taken = frontend.set_log_base(0, log.region(size)).is_ok();
        assert_eq!(taken, size > 0 && size <= file);
        if taken {
            frontend.set_features(FEATURES | F_LOG_ALL).unwrap_err();
        }
        assert!(Raw::new(&frontend).is_closed());
        served.wait_for_disconnect();
    }
}

#[test]
fn a_truncated_log_costs_only_the_connection() {
    let served = Served::new();
    let (memory, frontend, mut queue) = served.guest();
    let log = Log::new();
    start_logging(&frontend, &queue, &log);
    queue.check_read(0, 0);
    log.0.set_len(0).unwrap();
    queue.offer(1, IN, 0, DATA, 512);
    queue.kick();
    served.wait_for_disconnect();
    negotiate(&mut served.connect(), &memory);
}

#[test]
fn the_disk_is_free_when_the_last_ring_has_stopped() {
    let served = Served::with_queues(2);
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let queues = [Queue::new(&memory, 0), Queue::new(&memory, 1)];
    for queue in &queues {
        queue.start(&mut frontend, 0);
    }
    assert!(served.disk.is_active());
    // QEMU disables all rings before it stops any.
    frontend.set_vring_enable(0, false).unwrap();
    frontend.set_vring_enable(1, false).unwrap();
    frontend.get_vring_base(0).unwrap();
    assert!(served.disk.is_active());
    frontend.get_vring_base(1).unwrap();
    assert!(!served.disk.is_active());
    // The migration has failed, and the guest resumes here.
    for queue in &queues {
        queue.start(&mut frontend, 0);
    }
    assert!(served.disk.is_active());
}
