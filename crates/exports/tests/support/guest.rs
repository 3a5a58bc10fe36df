//! A guest: its memory is a file, and its driver writes rings into the file.

use fathom_testing::Deadline;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Guest physical address of the memory's start.
pub const GPA: u64 = 0x10_0000;
/// Front-end address of the memory's start; only translated, never accessed.
pub const USER: u64 = 0x7f00_0000_0000;
pub const MEMORY_SIZE: u64 = 2 << 20;
/// Offset of the data buffers.
pub const DATA: u64 = 0x10_0000;

pub const QUEUE_SIZE: u16 = 64;
const QUEUE_BYTES: u64 = 0x1_0000;
const AVAIL: u64 = 0x4000;
const USED: u64 = 0x8000;
const HEADERS: u64 = 0xc000;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;

const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;

pub const F_VERSION_1: u64 = 1 << 32;
pub const F_LOG_ALL: u64 = 1 << 26;
pub const F_PROTOCOL: u64 = 1 << 30;
pub const F_FLUSH: u64 = 1 << 9;

/// Waits until `condition` holds. Checks it often, since some tests wait for thousands of requests
/// one after the other.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Deadline::new(what);
    while !condition() {
        deadline.check();
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The file of a guest's memory.
pub struct Memory(pub File);

impl Memory {
    pub fn new() -> Arc<Memory> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("guest", flags).unwrap());
        file.set_len(MEMORY_SIZE).unwrap();
        Arc::new(Memory(file))
    }

    pub fn seal(&self) {
        fcntl_add_seals(&self.0, SealFlags::SHRINK).unwrap();
    }

    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        self.part(0, MEMORY_SIZE)
    }

    /// Describes a part of the memory as a region.
    pub fn part(&self, offset: u64, len: u64) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: GPA + offset,
            memory_size: len,
            userspace_addr: USER + offset,
            mmap_offset: offset,
            mmap_handle: self.0.as_raw_fd(),
        }
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.0.write_all_at(bytes, offset).unwrap();
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    pub fn read_u16(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(offset, 2).try_into().unwrap())
    }

    pub fn contents(&self) -> Vec<u8> {
        self.read(0, MEMORY_SIZE as usize)
    }
}

/// A virtqueue and its driver.
pub struct Queue {
    pub index: usize,
    pub memory: Arc<Memory>,
    pub kick: EventFd,
    pub call: EventFd,
    submitted: u16,
}

impl Queue {
    pub fn new(memory: &Arc<Memory>, index: usize) -> Queue {
        Queue {
            index,
            memory: memory.clone(),
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call: EventFd::new(EFD_NONBLOCK).unwrap(),
            submitted: 0,
        }
    }

    pub fn offset(&self) -> u64 {
        self.index as u64 * QUEUE_BYTES
    }

    pub fn addresses(&self) -> VringConfigData {
        let at = USER + self.offset();
        VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: at,
            used_ring_addr: at + USED,
            avail_ring_addr: at + AVAIL,
            log_addr: None,
        }
    }

    /// Returns the ring addresses, with logging of writes to the used ring.
    pub fn logged_addresses(&self) -> VringConfigData {
        VringConfigData {
            flags: 1,
            log_addr: Some(GPA + self.offset() + USED),
            ..self.addresses()
        }
    }

    fn header(&self, slot: u16) -> u64 {
        self.offset() + HEADERS + u64::from(slot) * 32
    }

    /// Makes a request available without a kick. The request uses three descriptors from `3 * slot`
    /// on, and its data is at offset `data` of the memory.
    pub fn offer(&mut self, slot: u16, kind: u32, sector: u64, data: u64, len: u32) {
        let header = self.header(slot);
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&0u32.to_le_bytes());
        bytes.extend_from_slice(&sector.to_le_bytes());
        bytes.push(0xff);
        self.memory.write(header, &bytes);
        let first = slot * 3;
        let data_flags = if kind == IN { F_WRITE } else { 0 };
        if len == 0 {
            self.descriptor(first, header, 16, F_NEXT, first + 2);
        } else {
            self.descriptor(first, header, 16, F_NEXT, first + 1);
            self.descriptor(first + 1, data, len, data_flags | F_NEXT, first + 2);
        }
        self.descriptor(first + 2, header + 16, 1, F_WRITE, 0);
        self.offer_head(first);
    }

    pub fn descriptor(&self, index: u16, offset: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&(GPA + offset).to_le_bytes());
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&next.to_le_bytes());
        self.memory
            .write(self.offset() + u64::from(index) * 16, &bytes);
    }

    pub fn offer_head(&mut self, head: u16) {
        let avail = self.offset() + AVAIL;
        let entry = avail + 4 + u64::from(self.submitted % QUEUE_SIZE) * 2;
        self.memory.write(entry, &head.to_le_bytes());
        self.submitted = self.submitted.wrapping_add(1);
        self.memory.write(avail + 2, &self.submitted.to_le_bytes());
    }

    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    pub fn used(&self) -> u16 {
        self.memory.read_u16(self.offset() + USED + 2)
    }

    /// Returns the head in the used ring's element `index`.
    pub fn used_head(&self, index: u16) -> u16 {
        let element = USED + 4 + u64::from(index % QUEUE_SIZE) * 8;
        self.memory.read_u16(self.offset() + element)
    }

    pub fn submitted(&self) -> u16 {
        self.submitted
    }

    /// Waits for all requests that were made available.
    pub fn wait(&self) {
        eventually("the queue's requests complete", || {
            self.used() == self.submitted
        });
    }

    pub fn status(&self, slot: u16) -> u8 {
        self.memory.read(self.header(slot) + 16, 1)[0]
    }

    /// Sets up the vring without starting it.
    pub fn describe(&self, frontend: &Frontend, base: u16) {
        frontend.set_vring_num(self.index, QUEUE_SIZE).unwrap();
        let addresses = self.addresses();
        frontend.set_vring_addr(self.index, &addresses).unwrap();
        frontend.set_vring_base(self.index, base).unwrap();
        frontend.set_vring_call(self.index, &self.call).unwrap();
    }

    /// Sets up, starts and enables the vring.
    pub fn start(&self, frontend: &mut Frontend, base: u16) {
        self.describe(frontend, base);
        frontend.set_vring_kick(self.index, &self.kick).unwrap();
        frontend.set_vring_enable(self.index, true).unwrap();
    }

    /// Reads a block and compares it with the disk's initial contents.
    pub fn check_read(&mut self, slot: u16, sector: u64) {
        let data = DATA + u64::from(slot) * 512;
        self.offer(slot, IN, sector, data, 512);
        self.kick();
        self.wait();
        assert_eq!(self.status(slot), 0);
        assert_eq!(self.memory.read(data, 512), vec![sector as u8 ^ 0x5a; 512]);
    }
}

/// Negotiates all features, with acknowledgements, and sends the memory table.
pub fn negotiate(frontend: &mut Frontend, memory: &Memory) {
    negotiate_features(frontend);
    frontend.set_mem_table(&[memory.region()]).unwrap();
}

pub fn negotiate_features(frontend: &mut Frontend) {
    use vhost::vhost_user::message::VhostUserHeaderFlag;
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    assert_ne!(features & F_PROTOCOL, 0);
    let protocol = frontend.get_protocol_features().unwrap();
    let expected = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::STATUS;
    assert_eq!(protocol, expected);
    frontend.set_protocol_features(protocol).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend
        .set_features(F_VERSION_1 | F_FLUSH | F_PROTOCOL)
        .unwrap();
}
