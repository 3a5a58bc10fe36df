//! A simulated guest, which submits requests to real workers on a disk.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod faulty;
pub mod model;

use fathom_core::source::Broken;
use fathom_core::{
    Cx, Disk, Engine, Op, Polling, Request, RequestId, Source, SourceId, WorkerHandle,
    WorkerOptions,
};
use fathom_testing::PATIENCE;
use libc::iovec;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Memory of the guest: plain bytes, accessed through raw pointers.
pub struct Memory {
    bytes: Vec<u8>,
}

impl Memory {
    pub fn new(len: usize, fill: u8) -> Memory {
        Memory {
            bytes: vec![fill; len],
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

/// A request of the guest. The request's memory belongs to the worker until the reply.
pub struct Ask {
    pub op: Op,
    pub offset: u64,
    pub len: u64,
    pub fua: bool,
    pub unmap: bool,
    pub memory: Memory,
    /// Start and length in `memory` of each segment.
    pub segments: Vec<(usize, usize)>,
}

impl Ask {
    pub fn new(op: Op, offset: u64, len: u64) -> Ask {
        Ask {
            op,
            offset,
            len,
            fua: false,
            unmap: true,
            memory: Memory::new(0, 0),
            segments: Vec::new(),
        }
    }

    /// Makes a read into one aligned buffer.
    pub fn read(offset: u64, len: u64) -> Ask {
        Ask::new(Op::Read, offset, len).aligned(vec![0xa5; len as usize])
    }

    /// Makes a write from one aligned buffer.
    pub fn write(offset: u64, data: &[u8]) -> Ask {
        Ask::new(Op::Write, offset, data.len() as u64).aligned(data.to_vec())
    }

    fn aligned(mut self, data: Vec<u8>) -> Ask {
        let len = data.len();
        let mut bytes = vec![0u8; len + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        bytes[start..start + len].copy_from_slice(&data);
        self.memory = Memory { bytes };
        self.segments = vec![(start, len)];
        self
    }

    /// Returns the bytes of the segments.
    pub fn data(&self) -> Vec<u8> {
        let part = |&(start, len): &(usize, usize)| &self.memory.bytes[start..start + len];
        self.segments.iter().flat_map(part).copied().collect()
    }
}

#[derive(Default)]
struct Ring {
    waiting: VecDeque<(u16, Request0)>,
    answered: HashMap<u16, i32>,
}

/// A request on its way to the worker.
struct Request0 {
    op: Op,
    offset: u64,
    len: u64,
    fua: bool,
    unmap: bool,
    segments: Vec<iovec>,
}

// SAFETY: the segments point into an Ask that its guest keeps until the reply; only the worker uses
// them meanwhile.
unsafe impl Send for Request0 {}

struct Port {
    ring: Mutex<Ring>,
    answered: Condvar,
    kick: OwnedFd,
}

struct TestSource {
    port: Arc<Port>,
    capacity: usize,
    finished: Vec<(u16, i32)>,
}

impl Source for TestSource {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn kick_fd(&self) -> Option<RawFd> {
        Some(self.port.kick.as_raw_fd())
    }

    fn pending(&mut self) -> bool {
        !self.port.ring.lock().waiting.is_empty()
    }

    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        let mut ring = self.port.ring.lock();
        for _ in 0..room {
            let Some((tag, asked)) = ring.waiting.pop_front() else {
                break;
            };
            let id = cx.slab.take().expect("room");
            let request = &mut cx.slab[id];
            request.op = asked.op;
            request.offset = asked.offset;
            request.len = asked.len;
            request.fua = asked.fua;
            request.unmap = asked.unmap;
            request.tag = tag;
            request.segments.clear();
            request.segments.extend_from_slice(&asked.segments);
            batch.push(id);
        }
        Ok(0)
    }

    fn finish(&mut self, request: &Request) {
        self.finished.push((request.tag, request.error));
    }

    fn publish(&mut self, _: &mut Cx) -> bool {
        let mut ring = self.port.ring.lock();
        for (tag, error) in self.finished.drain(..) {
            let earlier = ring.answered.insert(tag, error);
            assert_eq!(earlier, None, "answered twice");
        }
        true
    }

    fn notify(&mut self) {
        self.port.answered.notify_all();
    }

    fn arm(&mut self) -> bool {
        self.pending()
    }

    fn disarm(&mut self) {}

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// A request that was submitted and not yet waited for.
pub struct Asked {
    tag: u16,
    pub ask: Ask,
}

/// A guest with one worker and one queue on a disk.
pub struct Guest {
    worker: WorkerHandle,
    source: SourceId,
    port: Arc<Port>,
    next_tag: u16,
}

/// Maximum number of requests in flight.
pub const DEPTH: usize = 64;

impl Guest {
    pub fn new(
        disk: Arc<dyn Disk>,
        engine: impl FnOnce() -> io::Result<Box<dyn Engine>> + Send + 'static,
    ) -> Guest {
        let options = WorkerOptions {
            name: "test".into(),
            polling: Polling::Off,
            cpus: Vec::new(),
        };
        let worker = WorkerHandle::spawn(disk, engine, options).expect("a worker");
        let port = Arc::new(Port {
            ring: Mutex::default(),
            answered: Condvar::new(),
            kick: eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
        });
        let source = TestSource {
            port: port.clone(),
            capacity: DEPTH,
            finished: Vec::new(),
        };
        let source = worker.attach(Box::new(source)).expect("attached");
        Guest {
            worker,
            source,
            port,
            next_tag: 0,
        }
    }

    /// Makes a request available to the worker, without a kick.
    pub fn queue(&mut self, mut ask: Ask) -> Asked {
        let tag = self.next_tag;
        self.next_tag = self.next_tag.wrapping_add(1);
        let base = ask.memory.bytes.as_mut_ptr();
        let segment = |&(start, len): &(usize, usize)| iovec {
            iov_base: base.wrapping_add(start).cast(),
            iov_len: len,
        };
        let request = Request0 {
            op: ask.op,
            offset: ask.offset,
            len: ask.len,
            fua: ask.fua,
            unmap: ask.unmap,
            segments: ask.segments.iter().map(segment).collect(),
        };
        let mut ring = self.port.ring.lock();
        ring.waiting.push_back((tag, request));
        Asked { tag, ask }
    }

    pub fn kick(&self) {
        rustix::io::write(&self.port.kick, &1u64.to_ne_bytes()).expect("kicked");
    }

    pub fn start(&mut self, ask: Ask) -> Asked {
        let asked = self.queue(ask);
        self.kick();
        asked
    }

    /// Waits for the reply. Returns the errno, or 0, and the request with its memory.
    pub fn wait(&self, asked: Asked) -> (i32, Ask) {
        let mut ring = self.port.ring.lock();
        let missing = |ring: &mut Ring| !ring.answered.contains_key(&asked.tag);
        let answered = &self.port.answered;
        let timeout = answered.wait_while_for(&mut ring, missing, PATIENCE);
        let threads = || fathom_testing::threads_of(std::process::id());
        assert!(!timeout.timed_out(), "no answer\n{}", threads());
        let error = ring.answered.remove(&asked.tag).expect("answered");
        (error, asked.ask)
    }

    pub fn run(&mut self, ask: Ask) -> (i32, Ask) {
        let asked = self.start(ask);
        self.wait(asked)
    }

    pub fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, i32> {
        match self.run(Ask::read(offset, len)) {
            (0, ask) => Ok(ask.data()),
            (errno, _) => Err(errno),
        }
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> i32 {
        self.run(Ask::write(offset, data)).0
    }

    pub fn flush(&mut self) -> i32 {
        self.run(Ask::new(Op::Flush, 0, 0)).0
    }

    pub fn worker(&self) -> &WorkerHandle {
        &self.worker
    }

    /// Detaches the guest, which must have no requests in flight.
    pub fn detach(self) {
        drop(self.worker.detach(self.source));
    }
}
