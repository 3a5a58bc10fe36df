//! Tests of one front-end's session, with the front-end of the `vhost` crate.

use crate::support;

use crate::support::guest::{DATA, IN, Memory, OUT, Queue};
use crate::support::guest::{eventually, negotiate, negotiate_features};
use crate::support::raw::Raw;
use crate::support::served::Served;
use fathom_testing::PATIENCE;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use vhost::VhostBackend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, FrontendReqHandler, VhostUserFrontend};
use vhost::vhost_user::{HandlerResult, VhostUserFrontendReqHandler};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

#[test]
fn a_guest_reads_and_writes() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    assert_eq!(frontend.get_queue_num().unwrap(), 4);
    let mut queue = Queue::new(&memory, 0);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 7);
    memory.write(DATA, &[0xab; 1024]);
    queue.offer(1, OUT, 3, DATA, 1024);
    queue.kick();
    queue.wait();
    queue.offer(2, IN, 4, DATA + 4096, 512);
    queue.kick();
    queue.wait();
    assert_eq!((queue.status(1), queue.status(2)), (0, 0));
    assert_eq!(memory.read(DATA + 4096, 512), [0xab; 512]);
    assert_eq!(frontend.get_vring_base(0).unwrap(), 3);
    assert_eq!(served.disk.bytes.lock()[1536..2560], [0xab; 1024]);
}

#[test]
fn the_configuration_is_read_in_parts() {
    let served = Served::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let sectors = fathom_core::testing::SIZE / 512;
    for (offset, len) in [(0u32, 8usize), (0, 60), (0, 256), (0x100, 60)] {
        let config = read_config(&mut frontend, offset, len);
        assert_eq!(config.len(), len);
        assert_eq!(config[..8], sectors.to_le_bytes());
        assert!(config[60.min(len)..].iter().all(|b| *b == 0));
    }
}

fn read_config(frontend: &mut Frontend, offset: u32, len: usize) -> Vec<u8> {
    let flags = VhostUserConfigFlags::WRITABLE;
    let buf = vec![0; len];
    frontend
        .get_config(offset, len as u32, flags, &buf)
        .unwrap()
        .1
}

#[test]
fn the_write_cache_is_switched_and_nothing_else() {
    const WRITEBACK: u32 = 32;
    let served = Served::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let flags = VhostUserConfigFlags::empty();
    assert_eq!(read_config(&mut frontend, WRITEBACK, 1), [1]);
    frontend.set_config(WRITEBACK, flags, &[0]).unwrap();
    assert_eq!(read_config(&mut frontend, WRITEBACK, 1), [0]);
    frontend.set_config(0, flags, &[1; 8]).unwrap_err();
    // Neither a stopped guest nor a reconnecting front-end changes the setting,
    let mut raw = Raw::new(&frontend);
    raw.request(39, &0u64.to_ne_bytes());
    drop(raw);
    drop(frontend);
    served.wait_for_disconnect();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    assert_eq!(read_config(&mut frontend, WRITEBACK, 1), [0]);
    // but a reset does.
    frontend.reset_device().unwrap();
    assert_eq!(read_config(&mut frontend, WRITEBACK, 1), [1]);
}

#[test]
fn a_kick_before_enable_is_not_lost() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queue = Queue::new(&memory, 0);
    queue.describe(&frontend, 0);
    queue.offer(0, IN, 0, DATA, 512);
    queue.kick();
    frontend.set_vring_kick(0, &queue.kick).unwrap();
    queue.kick();
    assert_eq!(served.export.status().queues_running, 0);
    assert_eq!(queue.used(), 0);
    frontend.set_vring_enable(0, true).unwrap();
    queue.wait();
    frontend.set_vring_enable(0, false).unwrap();
    assert_eq!(served.export.status().queues_running, 0);
    // A disabled ring keeps the disk activated.
    assert!(served.disk.is_active());
    queue.offer(1, IN, 0, DATA, 512);
    queue.kick();
    frontend.set_vring_enable(0, true).unwrap();
    queue.wait();
}

#[test]
fn without_protocol_features_a_ring_starts_enabled() {
    let served = Served::new();
    let memory = Memory::new();
    let frontend = served.connect();
    frontend.set_owner().unwrap();
    frontend.get_features().unwrap();
    frontend.set_features(support::guest::F_VERSION_1).unwrap();
    frontend.set_mem_table(&[memory.region()]).unwrap();
    let mut queue = Queue::new(&memory, 0);
    queue.describe(&frontend, 0);
    frontend.set_vring_kick(0, &queue.kick).unwrap();
    queue.check_read(0, 1);
    assert_eq!(frontend.get_vring_base(0).unwrap(), 1);
}

#[test]
fn eventfds_change_under_way() {
    let served = Served::new();
    let (_, frontend, mut queue) = served.guest();
    queue.check_read(0, 0);
    eventually("the first interrupt", || queue.call.read().is_ok());
    let new_call = EventFd::new(EFD_NONBLOCK).unwrap();
    frontend.set_vring_call(0, &new_call).unwrap();
    queue.kick = EventFd::new(EFD_NONBLOCK).unwrap();
    frontend.set_vring_kick(0, &queue.kick).unwrap();
    while new_call.read().is_ok() {}
    while queue.call.read().is_ok() {}
    queue.check_read(1, 1);
    eventually("the new interrupt", || new_call.read().is_ok());
    assert!(queue.call.read().is_err());
    // A file that is always readable would keep the worker busy.
    let socket = UnixStream::pair().unwrap().0;
    let mut raw = Raw::new(&frontend);
    assert_eq!(raw.ack(12, &0u64.to_ne_bytes(), &[socket.as_raw_fd()]), 1);
}

/// Guests mask and unmask interrupts under load, and QEMU's main loop waits for the
/// acknowledgement.
#[test]
fn eventfds_are_replaced_while_requests_are_in_flight() {
    let served = Served::new();
    let (memory, frontend, mut queue) = served.guest();
    served.hold_a_read(&mut queue, 4);
    let fresh = || EventFd::new(EFD_NONBLOCK).unwrap();
    let old_call = std::mem::replace(&mut queue.call, fresh());
    queue.kick = fresh();
    let err = fresh();
    let changes = std::thread::spawn({
        let [call, kick, err] = [&queue.call, &queue.kick, &err].map(|fd| fd.try_clone().unwrap());
        move || {
            frontend.set_vring_call(0, &call).unwrap();
            frontend.set_vring_kick(0, &kick).unwrap();
            frontend.set_vring_err(0, &err).unwrap();
            frontend
        }
    });
    eventually("the changes are acknowledged", || changes.is_finished());
    let frontend = changes.join().unwrap();
    assert_eq!((served.disk.held.load(SeqCst), queue.used()), (1, 0));
    assert_eq!(served.export.status().queues_running, 1);
    // A new call eventfd is signalled, since a signal may have gone to the previous one.
    assert_eq!(queue.call.read().unwrap(), 1);
    while old_call.read().is_ok() {}
    queue.offer(1, IN, 5, DATA + 512, 512);
    queue.kick();
    eventually("the new kick is heard", || {
        served.disk.held.load(SeqCst) == 2
    });
    served.disk.release();
    queue.wait();
    eventually("the new interrupt", || queue.call.read().is_ok());
    old_call.read().unwrap_err();
    assert_eq!(memory.read(DATA + 512, 512), [5 ^ 0x5a; 512]);
    // An avail index beyond the ring's size.
    err.read().unwrap_err();
    memory.write(queue.offset() + 0x4002, &1000u16.to_le_bytes());
    queue.kick();
    eventually("the new error", || err.read().is_ok());
    drop(frontend);
}

/// After the acknowledgement, a front-end waits for the new eventfd only.
#[test]
fn no_interrupt_is_lost_while_its_eventfd_is_replaced() {
    let served = Served::new();
    let (_, frontend, mut queue) = served.guest();
    for round in 0..2000u16 {
        queue.offer(round % 16, IN, 1, DATA, 512);
        queue.kick();
        queue.call = EventFd::new(EFD_NONBLOCK).unwrap();
        frontend.set_vring_call(0, &queue.call).unwrap();
        while queue.used() != queue.submitted() {
            let event = queue.call.as_raw_fd();
            assert!(readable_in_time(event), "the interrupt of round {round}");
            let _ = queue.call.read();
        }
    }
}

/// Returns true if the file becomes readable within [`PATIENCE`].
fn readable_in_time(fd: RawFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    // SAFETY: the caller's file descriptor is open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let limit = Timespec::try_from(PATIENCE).unwrap();
    poll(&mut polled, Some(&limit)).unwrap() == 1
}

#[test]
fn a_call_eventfd_is_signalled_once_when_it_is_set() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queue = Queue::new(&memory, 0);
    queue.describe(&frontend, 0);
    assert_eq!(queue.call.read().unwrap(), 1);
    queue.start(&mut frontend, 0);
    queue.check_read(0, 0);
    let new_call = EventFd::new(EFD_NONBLOCK).unwrap();
    frontend.set_vring_call(0, &new_call).unwrap();
    // The running queue also signals, since its used ring is not empty.
    assert!((1..=2).contains(&new_call.read().unwrap()));
    new_call.read().unwrap_err();
}

#[test]
fn queues_run_side_by_side_and_a_wrong_one_is_refused() {
    let served = Served::with_queues(3);
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queues: Vec<Queue> = (0..3).map(|i| Queue::new(&memory, i)).collect();
    for queue in &queues {
        queue.start(&mut frontend, 0);
    }
    assert_eq!(served.export.status().queues_running, 3);
    for (slot, queue) in queues.iter_mut().enumerate() {
        queue.check_read(slot as u16, slot as u64);
    }
    frontend.set_vring_num(3, 64).unwrap_err();
    frontend.get_vring_base(1).unwrap();
    assert_eq!(served.export.status().queues_running, 2);
    assert!(served.disk.is_active());
    frontend.get_vring_base(0).unwrap();
    frontend.get_vring_base(2).unwrap();
    assert!(!served.disk.is_active());
    assert_eq!(served.disk.activated.load(SeqCst), 1);
}

#[test]
fn a_ring_that_runs_keeps_its_size_and_its_place() {
    let served = Served::new();
    let (_memory, frontend, mut queue) = served.guest();
    frontend.set_vring_num(0, 32).unwrap_err();
    frontend.set_vring_base(0, 7).unwrap_err();
    queue.check_read(0, 0);
    assert_eq!(frontend.get_vring_base(0).unwrap(), 1);
}

#[test]
fn a_reset_stops_everything() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let mut queue = Queue::new(&memory, 0);
    for _ in 0..2 {
        queue.start(&mut frontend, queue.submitted());
        queue.check_read(0, 0);
        frontend.reset_device().unwrap();
        assert_eq!(served.export.status().queues_running, 0);
        assert!(!served.disk.is_active());
        let features = support::guest::F_VERSION_1 | support::guest::F_PROTOCOL;
        frontend.set_features(features).unwrap();
    }
}

#[test]
fn device_status_is_kept() {
    let served = Served::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    let mut raw = Raw::new(&frontend);
    assert_eq!(raw.ack(39, &0xfu64.to_ne_bytes(), &[]), 0);
    assert_eq!(raw.request(40, &[]), 0xfu64.to_ne_bytes());
    assert_eq!(raw.ack(39, &0x100u64.to_ne_bytes(), &[]), 1);
    assert_eq!(raw.ack(39, &0u64.to_ne_bytes(), &[]), 0);
    assert_eq!(raw.request(40, &[]), 0u64.to_ne_bytes());
}

#[test]
fn what_is_not_supported_is_refused_or_ends_the_connection() {
    let served = Served::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    frontend.set_features(1 << 60).unwrap_err();
    let mut raw = Raw::new(&frontend);
    // SEND_RARP
    assert_eq!(raw.ack(19, &0u64.to_ne_bytes(), &[]), 1);
    // A kick eventfd is required.
    assert_eq!(raw.ack(12, &0x100u64.to_ne_bytes(), &[]), 1);
    assert!(served.export.status().peer_pid.is_some());
    frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
    frontend.set_features(1 << 60).unwrap();
    served.wait_for_disconnect();
}

#[test]
fn a_request_with_a_reply_is_not_answered_by_a_refusal() {
    let served = Served::new();
    // Vring 4 of 4, an in-flight area for 9 queues, and a log in an eventfd.
    let event = EventFd::new(0).unwrap();
    let state = [4u32.to_ne_bytes(), [0; 4]].concat();
    let area = [vec![0; 16], vec![9, 0, 64, 0], vec![0; 4]].concat();
    let log = [4096u64.to_ne_bytes(), [0; 8]].concat();
    for (request, payload, fds) in [
        (11, state, vec![]),
        (31, area, vec![]),
        (6, log, vec![event.as_raw_fd()]),
    ] {
        let mut frontend = served.connect();
        negotiate_features(&mut frontend);
        let mut raw = Raw::new(&frontend);
        raw.send(request, 9, &payload, &fds);
        assert!(raw.is_closed(), "{request}");
        served.wait_for_disconnect();
    }
}

#[test]
fn a_ring_that_its_driver_broke_is_stopped_and_started_again() {
    let served = Served::new();
    let (memory, mut frontend, mut queue) = served.guest();
    let broken = EventFd::new(EFD_NONBLOCK).unwrap();
    frontend.set_vring_err(0, &broken).unwrap();
    queue.check_read(0, 0);
    // An avail index beyond the ring's size.
    memory.write(queue.offset() + 0x4002, &1000u16.to_le_bytes());
    queue.kick();
    eventually("the error is signalled", || broken.read().is_ok());
    let base = frontend.get_vring_base(0).unwrap();
    assert_eq!(base, 1);
    memory.write(queue.offset() + 0x4002, &1u16.to_le_bytes());
    queue.start(&mut frontend, 1);
    queue.check_read(1, 1);
}

#[derive(Default)]
struct Notified(AtomicUsize);

impl VhostUserFrontendReqHandler for Notified {
    fn handle_config_change(&self) -> HandlerResult<u64> {
        self.0.fetch_add(1, SeqCst);
        Ok(0)
    }
}

#[test]
fn a_resize_reaches_the_front_end() {
    let served = Served::new();
    let mut frontend = served.connect();
    negotiate_features(&mut frontend);
    // The front-end has no back channel yet.
    served.export.config_changed();
    let notified = Arc::new(Notified::default());
    let mut handler = FrontendReqHandler::new(notified.clone()).unwrap();
    handler.set_reply_ack_flag(true);
    let fd = handler.get_tx_raw_fd();
    frontend.set_backend_request_fd(&fd).unwrap();
    for sectors in [2048u64, 4096] {
        served.export.device().set_size(sectors * 512);
        served.export.config_changed();
        handler.handle_request().unwrap();
        let config = read_config(&mut frontend, 0, 8);
        assert_eq!(config, sectors.to_le_bytes());
    }
    assert_eq!(notified.0.load(SeqCst), 2);
    // A front-end may close its end of the channel.
    drop(handler);
    served.export.config_changed();
    read_config(&mut frontend, 0, 8);
}
