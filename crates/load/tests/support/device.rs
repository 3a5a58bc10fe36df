//! A virtio-blk device in memory, which misbehaves on request ([`Fault`]). The `virtio-queue` crate
//! reads its rings.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

use super::{EVENT_IDX, INDIRECT, LOG_ALL, Serve, VERSION_1, Vring, call, wait_kick};

/// A fault that affects every n-th request to which it applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The device acknowledges a write, but does not store it.
    LoseWrite,
    /// The device stores only the first half of a write.
    TearWrite,
    /// The device stores a write in the next block.
    MisplaceWrite,
    /// The device completes a read without changing the buffer.
    SkipRead,
    /// The device reports IOERR.
    IoError,
    /// The device does not write the status byte.
    NoStatus,
    /// The device adds the used entry twice.
    Twice,
    /// The used entry names a head that was never pushed.
    StrangeHead,
    /// The used entry reports more bytes than are writable.
    LongUsed,
    /// The device stops sending interrupts.
    NoInterrupt,
    /// The device takes a request, and never completes it.
    LoseRequest,
    /// The device does not mark written pages in the dirty log.
    NoLog,
    /// The device closes the connection, and leaves requests unfinished that it has taken.
    HangUp,
}

/// VIRTIO_BLK_F_*.
const FLUSH: u64 = 1 << 9;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

/// A disk of 1 MiB.
pub struct Device {
    data: Mutex<Vec<u8>>,
    features: u64,
    fault: Option<(Fault, u32)>,
    /// Number of requests so far to which the fault applies.
    pub count: AtomicU32,
    silent: AtomicBool,
    /// Avail positions of requests that were taken but not finished when the connection was closed,
    /// by ring.
    unfinished: Mutex<HashMap<usize, Vec<u16>>>,
    /// Number of executed requests.
    pub executed: AtomicU32,
}

/// A parsed request.
struct Request {
    head: u16,
    kind: u32,
    offset: usize,
    data: Vec<Descriptor>,
    status: GuestAddress,
}

impl Device {
    pub const LEN: usize = 1 << 20;

    pub fn new(fault: Option<(Fault, u32)>) -> Device {
        Device {
            data: Mutex::new(vec![0; Device::LEN]),
            features: VERSION_1 | EVENT_IDX | INDIRECT | LOG_ALL | FLUSH | DISCARD | WRITE_ZEROES,
            fault,
            count: AtomicU32::new(0),
            silent: AtomicBool::new(false),
            unfinished: Mutex::default(),
            executed: AtomicU32::new(0),
        }
    }

    /// Creates a device without some features.
    pub fn without(features: u64) -> Device {
        let mut device = Device::new(None);
        device.features &= !features;
        device
    }

    /// Returns whether the fault affects this request.
    fn strikes(&self, fault: Fault, kind: u32) -> bool {
        let applies = match fault {
            Fault::LoseWrite | Fault::TearWrite | Fault::MisplaceWrite => kind == 1,
            Fault::SkipRead => kind == 0,
            _ => true,
        };
        match self.fault {
            Some((f, nth)) if f == fault && applies => {
                (self.count.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(nth)
            }
            _ => false,
        }
    }

    /// Executes the request on the disk. Returns the status, and the number of bytes written to the
    /// guest.
    fn execute(&self, memory: &GuestMemoryMmap, r: &Request) -> (u8, u32) {
        self.executed.fetch_add(1, Ordering::Relaxed);
        let mut disk = self.data.lock().unwrap();
        let mut at = r.offset;
        let mut written = 0;
        match r.kind {
            0 if self.strikes(Fault::SkipRead, 0) => {}
            0 => {
                for d in &r.data {
                    let len = d.len() as usize;
                    memory.write_slice(&disk[at..at + len], d.addr()).unwrap();
                    at += len;
                    written += d.len();
                }
            }
            1 => self.write(memory, &mut disk, r),
            4 => {}
            11 | 13 => {
                let mut range = [0u8; 16];
                memory.read_slice(&mut range, r.data[0].addr()).unwrap();
                let sector = u64::from_le_bytes(range[..8].try_into().unwrap());
                let count = u32::from_le_bytes(range[8..12].try_into().unwrap());
                let start = sector as usize * 512;
                // After a discard, the contents are undefined. This device changes them.
                let fill = if r.kind == 11 { 0xd5 } else { 0 };
                disk[start..start + count as usize * 512].fill(fill);
            }
            _ => return (2, 0),
        }
        if self.strikes(Fault::IoError, r.kind) {
            return (1, written);
        }
        (0, written)
    }

    fn write(&self, memory: &GuestMemoryMmap, disk: &mut [u8], r: &Request) {
        let total: usize = r.data.iter().map(|d| d.len() as usize).sum();
        let mut bytes = vec![0; total];
        let mut at = 0;
        for d in &r.data {
            let end = at + d.len() as usize;
            memory.read_slice(&mut bytes[at..end], d.addr()).unwrap();
            at = end;
        }
        let mut target = r.offset;
        if self.strikes(Fault::LoseWrite, 1) {
            return;
        }
        if self.strikes(Fault::TearWrite, 1) {
            bytes.truncate(total / 2);
        }
        if self.strikes(Fault::MisplaceWrite, 1) {
            target = (target + total) % (Device::LEN - total);
        }
        disk[target..target + bytes.len()].copy_from_slice(&bytes);
    }

    /// Executes a request, and adds it to the used ring.
    fn finish(&self, ring: &Vring, queue: &mut Queue, r: &Request) {
        let memory = &ring.memory;
        let (status, written) = self.execute(memory, r);
        if !self.strikes(Fault::NoStatus, r.kind) {
            memory.write_obj(status, r.status).unwrap();
        }
        let mut len = written + 1;
        let mut head = r.head;
        if self.strikes(Fault::LongUsed, r.kind) {
            len = 1 << 20;
        }
        if self.strikes(Fault::StrangeHead, r.kind) {
            head = ring.size - 1;
        }
        if !self.strikes(Fault::NoLog, r.kind) {
            self.log(ring, r);
        }
        queue.add_used(memory, head, len).unwrap();
        if self.strikes(Fault::Twice, r.kind) {
            queue.add_used(memory, head, len).unwrap();
        }
    }

    fn log(&self, ring: &Vring, r: &Request) {
        if ring.features & LOG_ALL == 0 {
            return;
        }
        let written = r.data.iter().filter(|d| d.is_write_only());
        let mut spans: Vec<(u64, u64)> = written
            .map(|d| (d.addr().raw_value(), u64::from(d.len())))
            .collect();
        spans.push((r.status.raw_value(), 1));
        spans.push((ring.used, 6 + 8 * u64::from(ring.size)));
        let log = ring.log.as_ref().expect("a log");
        for (start, len) in spans {
            for page in start / 4096..=(start + len - 1) / 4096 {
                assert!((page / 8) < log.size() as u64);
                // SAFETY: the byte is inside the log's mapping, and is only accessed atomically.
                let byte = unsafe { AtomicU8::from_ptr(log.as_ptr().add((page / 8) as usize)) };
                byte.fetch_or(1 << (page % 8), Ordering::Relaxed);
            }
        }
    }

    /// Takes some more requests, finishes only the last of them, and closes the connection.
    fn hang_up(&self, ring: &Vring, queue: &mut Queue, first: u16) {
        let mut left = vec![first];
        for _ in 0..3 {
            let position = queue.next_avail();
            let next = queue.iter(&ring.memory).unwrap().next();
            if next.is_some() {
                left.push(position);
            }
        }
        if left.len() > 1 {
            let last = left.pop().unwrap();
            let request = take(ring, queue, last);
            self.finish(ring, queue, &request);
        }
        self.unfinished.lock().unwrap().insert(ring.index, left);
        let _ = ring.connection.shutdown(std::net::Shutdown::Both);
    }

    fn notify(&self, ring: &Vring, queue: &mut Queue) {
        if self.silent.load(Ordering::Relaxed) {
            return;
        }
        if queue.needs_notification(&ring.memory).unwrap() {
            call(ring);
        }
    }
}

/// Parses the chain at an avail position, without changing the state of the queue.
fn take(ring: &Vring, queue: &mut Queue, position: u16) -> Request {
    let next = queue.next_avail();
    queue.set_next_avail(position);
    let chain = queue.iter(&ring.memory).unwrap().next().expect("a chain");
    queue.set_next_avail(next);
    let head = chain.head_index();
    let mut parts: Vec<Descriptor> = chain.collect();
    assert!(parts.len() >= 2, "header and status");
    let header = parts.remove(0);
    let status = parts.pop().unwrap();
    assert!(!header.is_write_only() && header.len() == 16);
    assert!(status.is_write_only() && status.len() == 1);
    let kind: u32 = ring.memory.read_obj(header.addr()).unwrap();
    let sector: u64 = ring
        .memory
        .read_obj(header.addr().unchecked_add(8))
        .unwrap();
    assert!(parts.iter().all(|d| d.is_write_only() == (kind == 0)));
    Request {
        head,
        kind,
        offset: sector as usize * 512,
        data: parts,
        status: status.addr(),
    }
}

impl Serve for Device {
    fn offer(&self) -> (u64, u64) {
        (self.features, Device::LEN as u64 / 512)
    }

    fn serve(&self, ring: Vring, stop: &AtomicBool) -> u16 {
        let mut queue = Queue::new(ring.size).unwrap();
        queue.set_size(ring.size);
        queue
            .try_set_desc_table_address(GuestAddress(ring.desc))
            .unwrap();
        queue
            .try_set_avail_ring_address(GuestAddress(ring.avail))
            .unwrap();
        queue
            .try_set_used_ring_address(GuestAddress(ring.used))
            .unwrap();
        queue.set_event_idx(ring.features & EVENT_IDX != 0);
        queue.set_ready(true);
        assert!(queue.is_valid(&ring.memory));
        let left = self.unfinished.lock().unwrap().remove(&ring.index);
        let left = left.unwrap_or_default();
        queue.set_next_used(ring.base);
        queue.set_next_avail(ring.base.wrapping_add(left.len() as u16));
        for position in left {
            let request = take(&ring, &mut queue, position);
            self.finish(&ring, &mut queue, &request);
        }
        self.notify(&ring, &mut queue);
        while !stop.load(Ordering::Relaxed) {
            if !self.drain(&ring, &mut queue) {
                break;
            }
            wait_kick(&ring);
        }
        queue.next_avail()
    }
}

impl Device {
    /// Serves all available requests. Returns `false` if the connection was closed.
    fn drain(&self, ring: &Vring, queue: &mut Queue) -> bool {
        loop {
            queue.disable_notification(&ring.memory).unwrap();
            loop {
                let position = queue.next_avail();
                if queue.iter(&ring.memory).unwrap().next().is_none() {
                    break;
                }
                let request = take(ring, queue, position);
                if self.strikes(Fault::HangUp, request.kind) {
                    self.hang_up(ring, queue, position);
                    return false;
                }
                if self.strikes(Fault::NoInterrupt, request.kind) {
                    self.silent.store(true, Ordering::Relaxed);
                }
                if !self.strikes(Fault::LoseRequest, request.kind) {
                    self.finish(ring, queue, &request);
                }
            }
            self.notify(ring, queue);
            if !queue.enable_notification(&ring.memory).unwrap() {
                return true;
            }
        }
    }
}
