//! Tests of how rings, connections and serving end, and how they start again.

use crate::support::guest::{
    DATA, IN, Memory, OUT, QUEUE_SIZE, Queue, eventually, negotiate, negotiate_features,
};
use crate::support::raw::Raw;
use crate::support::served::Served;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

#[test]
fn get_vring_base_waits_for_everything_in_flight() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queues = [Queue::new(&memory, 0), Queue::new(&memory, 1)];
    for queue in &mut queues {
        queue.start(&mut frontend, 0);
    }
    served.disk.hold();
    for slot in 0..8 {
        queues[0].offer(slot, IN, slot.into(), DATA + u64::from(slot) * 512, 512);
    }
    queues[0].kick();
    eventually("all are held", || served.disk.held.load(SeqCst) == 8);
    let stopper = std::thread::spawn({
        let frontend = frontend.clone();
        move || frontend.get_vring_base(0).unwrap()
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!stopper.is_finished());
    assert_eq!(queues[0].used(), 0);
    served.disk.release();
    assert_eq!(stopper.join().unwrap(), 8);
    assert_eq!(queues[0].used(), 8);
    // The other queue still runs, and the stopped queue's memory is not accessed.
    let before = memory.contents();
    queues[0].offer(8, IN, 1, DATA, 512);
    queues[0].kick();
    std::thread::sleep(Duration::from_millis(20));
    let after = memory.contents();
    let used = queues[0].offset() as usize + 0x8000;
    assert_eq!(before[used..used + 0x800], after[used..used + 0x800]);
    assert_eq!(before[DATA as usize..], after[DATA as usize..]);
    queues[1].check_read(9, 9);
    queues[0].start(&mut frontend, 8);
    queues[0].wait();
}

#[test]
fn a_disconnected_front_end_leaves_nothing_behind() {
    let served = Served::new();
    let (memory, frontend, mut queue) = served.guest();
    served.hold_a_read(&mut queue, 4);
    drop(frontend);
    // The next front-end need not wait until the disconnection has been noticed.
    let mut frontend = served.connect();
    served.disk.release();
    negotiate(&mut frontend, &memory);
    assert_eq!(memory.read(DATA, 512), [4 ^ 0x5a; 512]);
    assert_eq!(queue.used(), 1);
    assert_eq!(served.disk.deactivated.load(SeqCst), 1);
    queue.start(&mut frontend, 1);
    queue.check_read(1, 1);
}

#[test]
fn a_second_front_end_is_refused_while_there_is_a_first() {
    let served = Served::new();
    let (_, frontend, mut queue) = served.guest();
    for _ in 0..3 {
        assert!(Raw::connect(&served.path).is_closed());
        queue.check_read(0, 1);
    }
    let pid = std::process::id() as i32;
    assert_eq!(served.export.status().peer_pid, Some(pid));
    drop(frontend);
    served.wait_for_disconnect();
    negotiate_features(&mut served.connect());
}

#[test]
fn serving_stops_under_way() {
    let mut served = Served::new();
    let (_, frontend, mut queue) = served.guest();
    served.hold_a_read(&mut queue, 4);
    served.export.stop();
    std::thread::sleep(Duration::from_millis(50));
    served.disk.release();
    served.join();
    assert_eq!(queue.used(), 1);
    assert!(!served.disk.is_active());
    assert!(Raw::new(&frontend).is_closed());
}

#[test]
fn a_disk_that_cannot_be_activated_ends_the_connection() {
    let served = Served::new();
    let memory = Memory::new();
    served.disk.fail_activation.store(true, SeqCst);
    for acknowledged in [true, false] {
        let mut frontend = served.connect();
        negotiate(&mut frontend, &memory);
        let queue = Queue::new(&memory, 0);
        queue.describe(&frontend, 0);
        frontend.set_vring_enable(0, true).unwrap();
        if !acknowledged {
            frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
        }
        let outcome = frontend.set_vring_kick(0, &queue.kick);
        assert_eq!(outcome.is_err(), acknowledged);
        assert!(Raw::new(&frontend).is_closed());
        served.wait_for_disconnect();
    }
    served.disk.fail_activation.store(false, SeqCst);
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 0);
}

#[test]
fn a_full_interrupt_does_not_hold_up_a_drain() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queue = Queue::new(&memory, 0);
    // A write blocks when this eventfd is full.
    queue.call = EventFd::new(0).unwrap();
    queue.call.write(u64::MAX - 1).unwrap();
    queue.start(&mut frontend, 0);
    queue.offer(0, IN, 0, DATA, 512);
    queue.kick();
    queue.wait();
    assert_eq!(frontend.get_vring_base(0).unwrap(), 1);
    // A queue that starts with entries in its used ring also interrupts.
    queue.call = EventFd::new(0).unwrap();
    queue.call.write(u64::MAX - 1).unwrap();
    queue.start(&mut frontend, 1);
    drop(frontend);
    served.wait_for_disconnect();
}

#[test]
fn a_full_interrupt_holds_up_nobody_else_at_its_worker() {
    let served = Served::new();
    let (_memory, mut frontend, mut other) = served.guest();
    let memory = other.memory.clone();
    // A queue of the same worker, of which there are two.
    let mut queue = Queue::new(&memory, 2);
    let broken = EventFd::new(EFD_NONBLOCK).unwrap();
    queue.call = EventFd::new(0).unwrap();
    queue.describe(&frontend, 0);
    frontend.set_vring_err(2, &broken).unwrap();
    queue.start(&mut frontend, 0);
    // Each SET_VRING_CALL has signalled the eventfd. The next signal would block.
    queue.call.read().unwrap();
    queue.call.write(u64::MAX - 1).unwrap();
    for slot in 0..8 {
        queue.offer(slot, IN, 0, DATA + 0x1_0000, 512);
        queue.kick();
        other.check_read(slot, 1);
    }
    // The front-end learns of the error and may start the queue again.
    eventually("the queue is broken", || broken.read().is_ok());
    assert!(frontend.get_vring_base(2).unwrap() >= 1);
    queue.call = EventFd::new(EFD_NONBLOCK).unwrap();
    queue.start(&mut frontend, queue.used());
    queue.wait();
    other.check_read(8, 1);
}

#[test]
fn silent_front_end_is_replaced_and_half_a_message_ends_it() {
    let patience = Duration::from_millis(300);
    let served = Served::with_patience(patience);
    // Without other front-ends, a silent one may take its time.
    let mut silent = Raw::connect(&served.path);
    eventually("it is let in", || served.export.status().peer_pid.is_some());
    std::thread::sleep(2 * patience);
    silent.0.set_nonblocking(true).unwrap();
    let nothing = silent.0.read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    silent.0.set_nonblocking(false).unwrap();
    // Each waiting front-end gets its turn.
    let crowd: Vec<_> = (0..3).map(|_| Raw::connect(&served.path)).collect();
    let mut talks = Raw::connect(&served.path);
    assert_eq!(talks.request(1, &[]).len(), 8);
    for mut silent in std::iter::once(silent).chain(crowd) {
        assert!(silent.is_closed());
    }
    // A front-end that has sent a message stays; one that stops within a message does not.
    assert!(Raw::connect(&served.path).is_closed());
    talks.0.write_all(&Raw::header(1, 1, 0)[..5]).unwrap();
    assert!(talks.is_closed());
    served.wait_for_disconnect();
    let (_, _frontend, mut queue) = served.guest();
    queue.check_read(0, 1);
}

fn inflight_area(frontend: &mut Frontend, queue_size: u16) -> (VhostUserInflight, std::fs::File) {
    let wanted = VhostUserInflight::new(0, 0, 2, queue_size);
    let (area, file) = frontend.get_inflight_fd(&wanted).unwrap();
    assert_eq!(file.metadata().unwrap().len(), area.mmap_size);
    // The file cannot be truncated while the server maps it.
    file.set_len(0).unwrap_err();
    frontend.set_inflight_fd(&area, file.as_raw_fd()).unwrap();
    (area, file)
}

#[test]
fn what_was_in_flight_is_carried_out_by_the_next_process() {
    carried_out(QUEUE_SIZE);
}

/// As with firmware that uses larger queues than the device offers.
#[test]
fn queue_larger_than_negotiated_is_drained_too() {
    carried_out(QUEUE_SIZE / 4);
}

fn carried_out(said: u16) {
    // A process that dies, as its successor sees it: copies of the area and of the memory from one
    // moment.
    let (dead, served) = (Served::new(), Served::new());
    let memory = Memory::new();
    let mut frontend = dead.connect();
    negotiate(&mut frontend, &memory);
    let (area, file) = inflight_area(&mut frontend, said);
    let mut queue = Queue::new(&memory, 1);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 0);
    dead.disk.hold();
    memory.write(DATA, &[0x11; 512]);
    queue.offer(1, OUT, 8, DATA, 512);
    queue.offer(2, IN, 2, DATA + 512, 512);
    queue.kick();
    eventually("both are held", || dead.disk.held.load(SeqCst) == 2);
    let copy = Memory::new();
    copy.write(0, &memory.contents());
    let area_copy = tempfile::tempfile().unwrap();
    let mut bytes = vec![0; area.mmap_size as usize];
    use std::os::unix::fs::FileExt;
    file.read_exact_at(&mut bytes, 0).unwrap();
    (&area_copy).write_all(&bytes).unwrap();

    let mut frontend = served.connect();
    negotiate(&mut frontend, &copy);
    frontend
        .set_inflight_fd(&area, area_copy.as_raw_fd())
        .unwrap();
    queue.memory = copy.clone();
    // QEMU knows only the used index.
    queue.start(&mut frontend, queue.used());
    queue.wait();
    assert_eq!((queue.status(1), queue.status(2)), (0, 0));
    assert_eq!(served.disk.bytes.lock()[4096..4608], [0x11; 512]);
    assert_eq!(copy.read(DATA + 512, 512), [2 ^ 0x5a; 512]);
    assert_eq!(frontend.get_vring_base(1).unwrap(), 3);
    dead.disk.release();
}

#[test]
fn an_inflight_area_that_lies_is_refused() {
    let served = Served::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let (area, file) = inflight_area(&mut frontend, QUEUE_SIZE);
    let fd = file.as_raw_fd();
    let lies = [
        VhostUserInflight {
            num_queues: 5,
            ..area
        },
        VhostUserInflight {
            queue_size: 2048,
            ..area
        },
        VhostUserInflight {
            mmap_size: 64,
            ..area
        },
        VhostUserInflight {
            mmap_offset: 64,
            ..area
        },
        VhostUserInflight {
            mmap_offset: u64::MAX - 63,
            ..area
        },
    ];
    for lie in lies {
        frontend.set_inflight_fd(&lie, fd).unwrap_err();
    }
    frontend.set_inflight_fd(&area, fd).unwrap();
}

#[test]
fn garbage_ends_the_connection_and_only_that() {
    let served = Served::new();
    let header = |flags, size| Raw::header(1, flags, size);
    let garbage: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\n\r\n",
        // An invalid version, a length above the maximum, a reply, and an unexpected payload.
        &header(0, 0),
        &header(1, 4097),
        &header(5, 0),
        &[header(1, 1), vec![0]].concat(),
        // A message that ends early.
        &header(1, 8),
    ];
    for bytes in garbage {
        let mut raw = Raw::connect(&served.path);
        raw.0.write_all(bytes).unwrap();
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(raw.is_closed());
    }
    // More file descriptors than a message may have.
    let mut raw = Raw::connect(&served.path);
    let event = EventFd::new(0).unwrap();
    raw.send(5, 1, &[0; 8], &[event.as_raw_fd(); 33]);
    assert!(raw.is_closed());
    // A message that arrives byte by byte is valid.
    let mut raw = Raw::connect(&served.path);
    for byte in Raw::header(1, 1, 0) {
        raw.0.write_all(&[byte]).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(raw.reply(1).len(), 8);
}

#[test]
fn a_front_end_that_reads_no_replies_is_closed() {
    let served = Served::new();
    let mut raw = Raw::connect(&served.path);
    let message = Raw::header(1, 1, 0);
    let mut sent = 0u64;
    while raw.0.write_all(&message).is_ok() {
        sent += 1;
        assert!(sent < 10_000_000);
    }
    served.wait_for_disconnect();
}
