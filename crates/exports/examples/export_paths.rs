//! The paths of a request through virtqueues, stamps and NBD connections, without any I/O.
//! `tools/bench/instructions.py` counts their instructions.

use fathom_core::{
    Completion, Cx, Engine, FileId, Io, Op, RequestId, SocketIo, SocketIoKind, Source, SourceId,
    Stage, Stamps, Token, Wait, Wire,
};
use fathom_exports::nbd::connection::{Agreed, ExportView, Limits, NbdSource, Stream};
use fathom_nbd::protocol::{Replies, RequestHeader, command};
use fathom_testing::count_instructions;
use fathom_trace::{Recorder, StageHistograms, TraceRecord};
use fathom_virtio::features::{BLK_F_FLUSH, RING_F_EVENT_IDX, RING_F_INDIRECT_DESC};
use fathom_virtio::inflight::region_size;
use fathom_virtio::testing::{Buffer, Driver, TestMemory, context, device, disk};
use fathom_virtio::{BlkQueue, InflightQueue};
use std::cell::RefCell;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

const SIZE: u16 = 256;
const RINGS: u64 = 0x1000;
const TABLES: u64 = 0x10_0000;
const HEADERS: u64 = 0x20_0000;
const INFLIGHT: u64 = 0x30_0000;
const DATA: u64 = 0x100_0000;
const MEMORY: u64 = 64 << 20;
const BLOCK: u32 = 4096;

fn main() {
    for (name, batch, tracked) in [
        ("virtqueue, a request", 1, false),
        ("virtqueue, 32 requests", 32, false),
        ("virtqueue with in-flight region, 32 requests", 32, true),
    ] {
        let mut queue = Queue::new(batch, tracked);
        let requests = u32::from(batch);
        count_instructions(name, requests, &mut queue, Queue::offer, Queue::serve);
    }
    for (name, requests) in [
        ("stamps and histograms, a request", 1),
        ("stamps and histograms, 32 requests", 32),
    ] {
        let mut stamped = Stamped::new(requests);
        count_instructions(name, requests, &mut stamped, |_| (), Stamped::record);
    }
    for (name, requests) in [("NBD, a read of 4 KiB", 1), ("NBD, 32 reads of 4 KiB", 32)] {
        let mut client = Client::new(requests);
        count_instructions(name, requests, &mut client, Client::send, Client::serve);
    }
}

/// A virtqueue, its driver, and a worker that completes each request at once.
struct Queue {
    memory: TestMemory,
    driver: Driver,
    queue: BlkQueue,
    cx: Cx,
    popped: Vec<RequestId>,
    batch: u16,
}

impl Queue {
    fn new(batch: u16, tracked: bool) -> Queue {
        let memory = TestMemory::new(&[(0, MEMORY)]);
        let driver = Driver::new(&memory, RINGS, SIZE, true);
        let inflight = tracked.then(|| {
            let base = NonNull::new(memory.at(INFLIGHT, region_size(SIZE)));
            // SAFETY: a part of memory that is kept, and that no other code uses.
            unsafe { InflightQueue::new(base.expect("mapped"), SIZE, memory.guest().clone()) }
        });
        let features = RING_F_INDIRECT_DESC | RING_F_EVENT_IDX | BLK_F_FLUSH;
        let setup = driver.setup(features);
        let guest = memory.guest().clone();
        let queue = BlkQueue::new(setup, guest, None, inflight, Arc::new(device()));
        Queue {
            memory,
            driver,
            queue: queue.expect("a good queue"),
            cx: context(usize::from(SIZE)),
            popped: Vec::with_capacity(usize::from(SIZE)),
            batch,
        }
    }

    /// Does the driver's work: takes the replies of the last batch, and offers the next one.
    fn offer(&mut self) {
        while self.driver.take_used().is_some() {}
        self.driver.set_used_event(self.driver.next_used());
        for head in 0..self.batch {
            let header = HEADERS + u64::from(head) * 256;
            // SAFETY: 16 mapped bytes.
            unsafe {
                let at = self.memory.at(header, 16).cast::<u64>();
                at.write_volatile(0);
                at.add(1).write_volatile(u64::from(head) * 8);
            }
            let chain = [
                Buffer::readable(header, 16),
                Buffer::writable(DATA + u64::from(head) * u64::from(BLOCK), BLOCK),
                Buffer::writable(header + 16, 1),
            ];
            self.driver
                .put_indirect(head, TABLES + u64::from(head) * 64, &chain);
            self.driver.offer(head);
        }
        self.driver.publish();
    }

    /// Takes the batch from the queue, and answers it.
    fn serve(&mut self) {
        let room = usize::from(SIZE);
        let popped = self.queue.pop(&mut self.cx, room, &mut self.popped);
        popped.expect("a sane driver");
        for &id in &self.popped {
            self.queue.finish(&self.cx.slab[id]);
        }
        self.queue.publish(&mut self.cx);
        assert_eq!(self.popped.len(), usize::from(self.batch));
        self.popped.drain(..).for_each(|id| self.cx.slab.put(id));
    }
}

/// The stamps of a request that began at `now`.
fn stamps(now: u64) -> Stamps {
    let mut stamps = Stamps::start(now);
    for (at, stage) in (1..).zip(&Stage::ALL[1..]) {
        stamps.enter(*stage, now + 10 * at);
    }
    stamps.end(now + 100);
    stamps
}

fn record(stamps: &Stamps) -> TraceRecord {
    TraceRecord {
        stamps: stamps.raw(),
        offset: 0,
        len: u64::from(BLOCK),
        queue: 0,
        op: Op::Read,
        error: 0,
        polled: false,
        wire: Wire::None,
    }
}

/// A worker's recorder. All its times are constants, and no request is among the slowest.
struct Stamped {
    recorder: Recorder,
    requests: u32,
}

impl Stamped {
    fn new(requests: u32) -> Stamped {
        let mut recorder = Recorder::new(Arc::new(StageHistograms::default()));
        for n in 0..8 {
            let mut slow = Stamps::start(0);
            slow.end(1_000_000 + n);
            recorder.record(Op::Read, 0, &slow, || record(&slow));
            recorder.flush();
        }
        Stamped { recorder, requests }
    }

    /// Stamps and counts requests that make each transition together, as a worker does.
    fn record(&mut self) {
        for _ in 0..self.requests {
            let stamps = stamps(std::hint::black_box(1_000_000));
            let bytes = u64::from(BLOCK);
            self.recorder
                .record(Op::Read, bytes, &stamps, || record(&stamps));
        }
        self.recorder.flush();
    }
}

/// An engine whose socket operations wait until the client acts.
#[derive(Default)]
struct Sockets(Rc<RefCell<Pending>>);

#[derive(Default)]
struct Pending {
    receive: Option<(SocketIo, Token)>,
    send: Option<(SocketIo, Token)>,
}

impl Engine for Sockets {
    fn name(&self) -> &'static str {
        "sockets"
    }

    fn reserve(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn add_file(&mut self, _: BorrowedFd<'_>) -> io::Result<FileId> {
        unreachable!("no disk has a file")
    }

    fn remove_file(&mut self, _: FileId) {}

    unsafe fn push(&mut self, _: Io, _: Token) {
        unreachable!("no disk has a file")
    }

    fn add_socket(&mut self, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    unsafe fn push_socket(&mut self, io: SocketIo, token: Token) {
        let mut pending = self.0.borrow_mut();
        match io.kind {
            SocketIoKind::Receive => pending.receive = Some((io, token)),
            SocketIoKind::Send => pending.send = Some((io, token)),
        }
    }

    fn watch(&mut self, _: RawFd, _: Token) -> io::Result<()> {
        Ok(())
    }

    fn unwatch(&mut self, _: RawFd, _: Token) {}

    fn submit(&mut self, _: Wait, _: &mut Vec<Completion>) -> io::Result<()> {
        Ok(())
    }

    fn ready(&mut self) -> bool {
        false
    }
}

/// A client of an NBD connection, and a worker that completes each request at once.
struct Client {
    cx: Cx,
    source: NbdSource,
    id: SourceId,
    pending: Rc<RefCell<Pending>>,
    popped: Vec<RequestId>,
    requests: u32,
    /// Tag of the connection's receive, and the number of bytes that it has received.
    received: (u8, i32),
}

impl Client {
    fn new(requests: u32) -> Client {
        let (ours, _theirs) = UnixStream::pair().expect("a socket pair");
        let stream = Stream {
            socket: ours.into(),
            tls: None,
            read_ahead: Vec::new(),
        };
        let export = ExportView::new("disk", &disk());
        let agreed = Agreed {
            replies: Replies::Simple,
            ..Agreed::default()
        };
        let limits = Limits::default();
        let source = NbdSource::new(stream, &export, agreed, limits, 0, Box::new(|| ()));
        let mut source = source.expect("a source");
        let pending = Rc::new(RefCell::new(Pending::default()));
        let mut cx = Cx::new(Box::new(Sockets(pending.clone())));
        cx.slab.grow(source.capacity());
        let id = SourceId::new(0, 1);
        source.start(&mut cx, id).expect("started");
        let mut client = Client {
            cx,
            id,
            pending,
            popped: Vec::with_capacity(source.capacity()),
            source,
            requests,
            received: (0, 0),
        };
        client.turn();
        client
    }

    /// Takes all replies, and puts the next requests where the connection receives.
    fn send(&mut self) {
        self.take_replies();
        let mut bytes = Vec::new();
        for n in 0..self.requests {
            let header = RequestHeader {
                flags: 0,
                command: command::READ,
                cookie: u64::from(n),
                offset: u64::from(n) * u64::from(BLOCK),
                len: u64::from(BLOCK),
            };
            header.put(Replies::Simple, &mut bytes);
        }
        let receive = self.pending.borrow_mut().receive.take();
        let (io, token) = receive.expect("the connection receives");
        let mut rest = &bytes[..];
        for segment in segments(&io) {
            let (now, later) = rest.split_at(segment.iov_len.min(rest.len()));
            // SAFETY: the connection keeps the memory of its receive until that completes.
            unsafe {
                segment
                    .iov_base
                    .cast::<u8>()
                    .copy_from_nonoverlapping(now.as_ptr(), now.len());
            }
            rest = later;
        }
        assert!(rest.is_empty(), "the connection has too little room");
        self.received = (self.tag(token), bytes.len() as i32);
    }

    fn take_replies(&mut self) {
        loop {
            let Some((io, token)) = self.pending.borrow_mut().send.take() else {
                return;
            };
            let sent: usize = segments(&io).iter().map(|segment| segment.iov_len).sum();
            let tag = self.tag(token);
            self.source.completed(&mut self.cx, tag, sent as i32);
            self.turn();
        }
    }

    fn tag(&self, token: Token) -> u8 {
        let tag = (0..=u8::MAX).find(|tag| self.id.token(*tag) == token);
        tag.expect("an operation of the connection")
    }

    /// Receives the requests, and answers them.
    fn serve(&mut self) {
        let (tag, received) = self.received;
        self.source.completed(&mut self.cx, tag, received);
        assert_eq!(self.turn(), self.requests as usize);
    }

    /// Does a worker's turn. Returns the number of requests.
    fn turn(&mut self) -> usize {
        let room = self.source.capacity();
        let popped = self.source.pop(&mut self.cx, room, &mut self.popped);
        popped.expect("a sane client");
        let count = self.popped.len();
        for id in self.popped.drain(..) {
            self.cx.slab[id].error = 0;
            self.source.finish(&self.cx.slab[id]);
            self.cx.slab.put(id);
        }
        self.source.publish(&mut self.cx);
        count
    }
}

fn segments(io: &SocketIo) -> &[libc::iovec] {
    // SAFETY: the connection keeps the message of an operation until that completes.
    unsafe {
        let message = &*io.message;
        std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen as _)
    }
}
