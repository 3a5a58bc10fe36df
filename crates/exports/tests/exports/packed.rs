//! Tests of packed virtqueues: negotiation, positions, and what crosses to another process.

use crate::handover::Successor;
use crate::support::guest::{
    DATA, F_FLUSH, F_PROTOCOL, F_VERSION_1, GPA, IN, Memory, USER, eventually, negotiate,
};
use crate::support::raw::Raw;
use crate::support::served::Served;
use fathom_exports::vhost_user::Options;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const SET_FEATURES: u32 = 2;
const SET_VRING_BASE: u32 = 10;
const PACKED: u64 = 1 << 34;
const FEATURES: u64 = F_VERSION_1 | F_FLUSH | F_PROTOCOL | PACKED;

/// Not a power of two.
const SIZE: u16 = 5;
const DRIVER_EVENT: u64 = 0x1000;
const DEVICE_EVENT: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A packed queue whose driver has one request of three descriptors at a time.
struct Packed {
    memory: Arc<Memory>,
    kick: EventFd,
    call: EventFd,
    index: u16,
    wrap: bool,
}

impl Packed {
    fn new(memory: &Arc<Memory>) -> Packed {
        Packed {
            memory: memory.clone(),
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call: EventFd::new(EFD_NONBLOCK).unwrap(),
            index: 0,
            wrap: true,
        }
    }

    /// Returns the position for both directions, as in GET_VRING_BASE.
    fn base(&self) -> u32 {
        let word = u32::from(self.index) | u32::from(self.wrap) << 15;
        word | word << 16
    }

    fn describe(&self, frontend: &Frontend) {
        frontend.set_vring_num(0, SIZE).unwrap();
        let addresses = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: USER,
            used_ring_addr: USER + DEVICE_EVENT,
            avail_ring_addr: USER + DRIVER_EVENT,
            log_addr: None,
        };
        frontend.set_vring_addr(0, &addresses).unwrap();
        frontend.set_vring_call(0, &self.call).unwrap();
    }

    fn start(&self, frontend: &mut Frontend) {
        self.describe(frontend);
        frontend.set_vring_kick(0, &self.kick).unwrap();
        frontend.set_vring_enable(0, true).unwrap();
    }

    fn descriptor(&mut self, offset: u64, len: u32, flags: u16) {
        let mut bytes = (GPA + offset).to_le_bytes().to_vec();
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&3u16.to_le_bytes());
        let at = u64::from(self.index) * 16;
        self.memory.write(at, &bytes);
        let owner = if self.wrap { AVAIL } else { USED };
        self.memory.write(at + 14, &(flags | owner).to_le_bytes());
        self.index += 1;
        if self.index == SIZE {
            (self.index, self.wrap) = (0, !self.wrap);
        }
    }

    /// Makes a read of one sector available.
    fn offer(&mut self, sector: u64) {
        let mut header = IN.to_le_bytes().to_vec();
        header.extend_from_slice(&[0; 4]);
        header.extend_from_slice(&sector.to_le_bytes());
        header.push(0xff);
        self.memory.write(HEADER, &header);
        self.memory.write(DATA, &[0; 512]);
        self.descriptor(HEADER, 16, NEXT);
        self.descriptor(DATA, 512, NEXT | WRITE);
        self.descriptor(HEADER + 16, 1, WRITE);
    }

    /// Waits until the request that was offered at this position is used, and checks its data.
    fn wait(&self, (index, wrap): (u16, bool), sector: u64) {
        let at = u64::from(index) * 16;
        let used = if wrap { AVAIL | USED } else { 0 };
        eventually("the request completes", || {
            self.memory.read_u16(at + 14) & (AVAIL | USED) == used
        });
        assert_eq!(self.memory.read_u16(at + 12), 3, "the buffer's id");
        assert_eq!(self.memory.read(at + 8, 4), 513u32.to_le_bytes());
        assert_eq!(self.memory.read(HEADER + 16, 1), [0]);
        assert_eq!(self.memory.read(DATA, 512), vec![sector as u8 ^ 0x5a; 512]);
    }

    fn check_read(&mut self, sector: u64) {
        let at = (self.index, self.wrap);
        self.offer(sector);
        self.kick.write(1).unwrap();
        self.wait(at, sector);
    }
}

fn served() -> Served {
    let options = Options {
        max_queues: 4,
        packed: true,
        ..Options::default()
    };
    Served::with_options(options)
}

fn guest(served: &Served) -> (Frontend, Packed) {
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    frontend.set_features(FEATURES).unwrap();
    (frontend, Packed::new(&memory))
}

fn set_base(frontend: &Frontend, base: u32) -> u64 {
    let payload = [0u32.to_ne_bytes(), base.to_ne_bytes()].concat();
    Raw::new(frontend).ack(SET_VRING_BASE, &payload, &[])
}

#[test]
fn packed_queue_continues_at_the_position_it_reported() {
    let served = served();
    let (mut frontend, mut queue) = guest(&served);
    queue.start(&mut frontend);
    for round in 0..4 {
        (0..7).for_each(|sector| queue.check_read(sector));
        let base = frontend.get_vring_base(0).unwrap();
        assert_eq!(base, queue.base(), "round {round}");
        assert_eq!(set_base(&frontend, base), 0);
        queue.start(&mut frontend);
    }
}

/// The successor does not offer packed queues itself.
#[test]
fn packed_queue_crosses_an_upgrade_with_its_position() {
    let served = served();
    let (mut frontend, mut queue) = guest(&served);
    queue.start(&mut frontend);
    (0..6).for_each(|sector| queue.check_read(sector));
    let frozen = served.export.freeze().unwrap();
    assert!(frozen.state.as_ref().unwrap().has_packed_queues());
    drop(frozen);
    let successor = Successor::of(&served);
    (6..13).for_each(|sector| queue.check_read(sector));
    assert_eq!(successor.export.status().queues_running, 1);
    let base = frontend.get_vring_base(0).unwrap();
    assert_eq!(base, queue.base());
}

#[test]
fn packed_queue_outside_its_ring_is_refused() {
    let served = served();
    let (frontend, queue) = guest(&served);
    queue.describe(&frontend);
    for base in [0x8005_8005, 0x8000_8001 + 5, 0x8001_8000] {
        assert_eq!(set_base(&frontend, base), 0);
        frontend.set_vring_kick(0, &queue.kick).unwrap();
        let mut frontend = frontend.clone();
        assert!(frontend.set_vring_enable(0, true).is_err(), "{base:#x}");
        frontend.set_vring_enable(0, false).unwrap();
    }
}

#[test]
fn in_flight_area_of_split_queues_is_refused_for_packed_ones() {
    let served = served();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    let set_area = |frontend: &mut Frontend| {
        let wanted = VhostUserInflight::new(0, 0, 1, SIZE);
        let (area, file) = frontend.get_inflight_fd(&wanted).unwrap();
        frontend.set_inflight_fd(&area, file.as_raw_fd()).unwrap();
        area.mmap_size
    };
    let split = set_area(&mut frontend);
    frontend.set_features(FEATURES).unwrap();
    let mut queue = Packed::new(&memory);
    queue.describe(&frontend);
    frontend.set_vring_kick(0, &queue.kick).unwrap();
    assert!(frontend.set_vring_enable(0, true).is_err());
    frontend.set_vring_enable(0, false).unwrap();
    assert!(set_area(&mut frontend) > split);
    queue.start(&mut frontend);
    queue.check_read(1);
}

#[test]
fn packed_queues_need_the_option() {
    let served = Served::new();
    let memory = Memory::new();
    let mut frontend = served.connect();
    negotiate(&mut frontend, &memory);
    assert_eq!(frontend.get_features().unwrap() & PACKED, 0);
    let mut raw = Raw::new(&frontend);
    for feature in [PACKED, 1 << 33, 1 << 35] {
        let features = (F_VERSION_1 | F_PROTOCOL | feature).to_ne_bytes();
        assert_eq!(raw.ack(SET_FEATURES, &features, &[]), 1);
    }
}
