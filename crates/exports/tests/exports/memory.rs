//! Tests of the guest's memory: tables, slots, and front-ends that describe it wrongly.

use crate::support::fuse::Fuse;
use crate::support::guest::{DATA, GPA, IN, MEMORY_SIZE, Memory, Queue, USER};
use crate::support::guest::{negotiate, negotiate_features};
use crate::support::raw::Raw;
use crate::support::served::Served;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::sync::atomic::Ordering::SeqCst;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

const PART: u64 = MEMORY_SIZE / 4;

#[test]
fn memory_comes_and_goes_by_slots() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    assert_eq!(frontend.get_max_mem_slots().unwrap(), 509);
    for i in 0..4 {
        let part = memory.part(i * PART, PART);
        frontend.add_mem_region(&part).unwrap();
        frontend.add_mem_region(&part).unwrap_err();
    }
    let mut queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 0);
    // Without the region of the data, requests to it fail, but the queue still runs.
    let data = memory.part(2 * PART, PART);
    assert_eq!(DATA, 2 * PART);
    frontend.remove_mem_region(&data).unwrap();
    frontend.remove_mem_region(&data).unwrap_err();
    queue.offer(1, IN, 0, DATA, 512);
    queue.kick();
    queue.wait();
    assert_eq!(queue.status(1), 1);
    // The region of the rings is removed and added again.
    let rings = memory.part(0, PART);
    frontend.remove_mem_region(&rings).unwrap();
    assert_eq!(served.export.status().queues_running, 0);
    assert!(served.disk.is_active());
    queue.offer(2, IN, 0, 3 * PART, 512);
    queue.kick();
    frontend.add_mem_region(&rings).unwrap();
    queue.wait();
    assert_eq!(queue.status(2), 0);
    frontend.add_mem_region(&data).unwrap();
    queue.check_read(3, 5);
}

#[test]
fn a_new_table_replaces_the_old_one_under_way() {
    let served = Served::new();
    let (memory, frontend, mut queue) = served.guest();
    served.hold_a_read(&mut queue, 9);
    let setter = std::thread::spawn({
        let frontend = frontend.clone();
        let memory = memory.clone();
        move || {
            let parts = [memory.part(0, PART * 3), memory.part(PART * 3, PART)];
            frontend.set_mem_table(&parts).unwrap();
        }
    });
    // The server waits for requests in the old memory.
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!setter.is_finished());
    served.disk.release();
    setter.join().unwrap();
    assert_eq!(memory.read(DATA, 512), [9 ^ 0x5a; 512]);
    queue.check_read(1, 1);
    assert_eq!(served.disk.activated.load(SeqCst), 1);
}

fn lying(memory: &Memory, change: impl FnOnce(&mut VhostUserMemoryRegionInfo)) -> bool {
    let served = Served::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let mut region = memory.region();
    change(&mut region);
    let by_table = frontend.set_mem_table(&[region]).is_ok();
    // Fails for a wrong region as well as for one that is already mapped.
    frontend.add_mem_region(&region).unwrap_err();
    by_table
}

#[test]
fn regions_that_lie_are_refused() {
    let memory = Memory::new();
    assert!(lying(&memory, |_| {}));
    assert!(lying(&memory, |r| {
        // The offset is not page-aligned.
        r.mmap_offset = 8;
        r.memory_size -= 8;
    }));
    assert!(!lying(&memory, |r| r.memory_size += 1));
    assert!(!lying(&memory, |r| r.mmap_offset = 1));
    assert!(!lying(&memory, |r| r.memory_size = u64::MAX));
    assert!(!lying(&memory, |r| r.mmap_offset = u64::MAX - 4095));
    assert!(!lying(&memory, |r| r.guest_phys_addr = u64::MAX - 4095));
    assert!(!lying(&memory, |r| r.userspace_addr = u64::MAX - 4095));
    let dir = std::fs::File::open("/").unwrap();
    assert!(!lying(&memory, |r| r.mmap_handle = dir.as_raw_fd()));
    let read_only = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(!lying(&memory, |r| {
        r.mmap_handle = read_only.as_raw_fd();
        r.memory_size = 4096;
    }));
}

#[test]
fn overlapping_regions_are_refused_and_the_old_table_stays() {
    let served = Served::new();
    let (memory, mut frontend, mut queue) = served.guest();
    let overlapping = [memory.part(0, PART), memory.part(PART - 4096, PART)];
    frontend.set_mem_table(&overlapping).unwrap_err();
    frontend.add_mem_region(&memory.part(0, 4096)).unwrap_err();
    queue.check_read(0, 2);
}

#[test]
fn a_table_of_more_regions_than_the_classic_eight() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let part = MEMORY_SIZE / 32;
    let parts: Vec<_> = (0..32).map(|i| memory.part(i * part, part)).collect();
    frontend.set_mem_table(&parts).unwrap();
    let mut queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 2);
}

#[test]
fn rings_outside_memory_do_not_start() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let queue = Queue::new(&memory, 0);
    let good = queue.addresses();
    let bad = [
        VringConfigData {
            desc_table_addr: USER - 16,
            ..good
        },
        VringConfigData {
            desc_table_addr: USER + MEMORY_SIZE - 16,
            ..good
        },
        VringConfigData {
            avail_ring_addr: USER + MEMORY_SIZE - 2,
            ..good
        },
        VringConfigData {
            used_ring_addr: u64::MAX - 3,
            ..good
        },
        VringConfigData {
            used_ring_addr: GPA,
            ..good
        },
        VringConfigData {
            used_ring_addr: good.used_ring_addr + 1,
            ..good
        },
    ];
    for addresses in bad {
        frontend.set_vring_num(0, 64).unwrap();
        frontend.set_vring_addr(0, &addresses).unwrap();
        frontend.set_vring_enable(0, true).unwrap();
        frontend.set_vring_kick(0, &queue.kick).unwrap_err();
    }
    for size in [3, 2048] {
        frontend.set_vring_num(0, size).unwrap();
        frontend.set_vring_addr(0, &good).unwrap();
        frontend.set_vring_kick(0, &queue.kick).unwrap_err();
    }
    assert_eq!(served.export.status().queues_running, 0);
    assert_eq!(served.disk.activated.load(SeqCst), 0);
    let mut queue = queue;
    queue.start(&mut frontend, 0);
    queue.check_read(0, 0);
}

/// Alignment is checked for front-end addresses, but the mapping may shift them.
#[test]
fn rings_that_are_mapped_askew_do_not_start() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let region = VhostUserMemoryRegionInfo {
        memory_size: MEMORY_SIZE - 4096,
        mmap_offset: 1,
        ..memory.region()
    };
    frontend.set_mem_table(&[region]).unwrap();
    let queue = Queue::new(&memory, 0);
    queue.describe(&frontend, 0);
    frontend.set_vring_enable(0, true).unwrap();
    frontend.set_vring_kick(0, &queue.kick).unwrap_err();
    assert_eq!(served.export.status().queues_running, 0);
}

#[test]
fn kicks_without_work_do_nothing() {
    let served = Served::new();
    let (_, frontend, mut queue) = served.guest();
    for _ in 0..1000 {
        queue.kick();
    }
    queue.check_read(0, 0);
    assert_eq!(frontend.get_vring_base(0).unwrap(), 1);
}

/// Runs a healthy guest at the same time as a guest that truncates its memory.
fn truncate(upset: impl FnOnce(&Memory, &mut Queue, &mut Frontend)) {
    let (served, other) = (Served::new(), Served::new());
    let (memory, other_memory) = (Memory::new(), Memory::new());
    let (mut frontend, mut other_frontend) = (served.connect(), other.connect());
    negotiate(&mut frontend, &memory);
    negotiate(&mut other_frontend, &other_memory);
    let mut queue = Queue::new(&memory, 0);
    let mut other_queue = Queue::new(&other_memory, 0);
    queue.start(&mut frontend, 0);
    other_queue.start(&mut other_frontend, 0);
    queue.check_read(0, 0);
    upset(&memory, &mut queue, &mut frontend);
    served.wait_for_disconnect();
    assert!(!served.disk.is_active());
    assert!(Raw::new(&frontend).is_closed());
    other_queue.check_read(0, 3);
    // The disk can serve another guest afterwards.
    let (_, _frontend, mut queue) = served.guest();
    queue.check_read(0, 0);
}

#[test]
fn truncating_the_rings_costs_only_the_connection() {
    truncate(|memory, queue, _| {
        memory.0.set_len(0).unwrap();
        queue.kick();
    });
}

#[test]
fn truncating_the_data_costs_only_the_connection() {
    truncate(|memory, queue, _| {
        memory.0.set_len(DATA).unwrap();
        queue.offer(1, IN, 0, DATA + 4096, 512);
        queue.kick();
    });
}

#[test]
fn truncating_before_a_ring_starts_costs_only_the_connection() {
    truncate(|memory, queue, frontend| {
        frontend.get_vring_base(0).unwrap();
        memory.0.set_len(0).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
        frontend.set_vring_kick(0, &queue.kick).unwrap();
    });
}

#[test]
fn memory_that_cannot_be_truncated_is_welcome() {
    let served = Served::new();
    let memory = Memory::new();
    memory.seal();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 0);
}

/// A page fault would wait for the owner of the file system, possibly for ever, and so would the
/// worker.
#[test]
fn memory_whose_pages_may_never_come_is_refused() {
    let served = Served::new();
    let fuse = Fuse::mount();
    drop(fuse.open()); // this open tells the kernel that FLUSH is not supported
    let file = fuse.open();
    fuse.fall_silent();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let region = VhostUserMemoryRegionInfo {
        mmap_handle: file.as_raw_fd(),
        ..Memory::new().region()
    };
    frontend.add_mem_region(&region).unwrap_err();
    // The file is not accepted as an eventfd either.
    let event = || {
        // SAFETY: the descriptor is new and open.
        unsafe { EventFd::from_raw_fd(file.try_clone().unwrap().into_raw_fd()) }
    };
    frontend.set_vring_call(0, &event()).unwrap_err();
    frontend.set_vring_kick(0, &event()).unwrap_err();
    frontend.set_vring_err(0, &event()).unwrap_err();
    let memory = Memory::new();
    frontend.set_mem_table(&[memory.region()]).unwrap();
    let mut queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 0);
    assert!(!fuse.was_asked());
    // A file on a local disk is accepted as memory.
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(MEMORY_SIZE).unwrap();
    let memory = Memory(file);
    let region = memory.part(0, PART);
    frontend.set_mem_table(&[region]).unwrap();
}
