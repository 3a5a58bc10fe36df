//! Body of a fuzz target: a connection whose worker and engine act when the input says. Not a
//! public interface.

use super::{Agreed, ExportView, Limits, NbdSource, Stream};
use fathom_core::{
    Completion, Cx, Engine, FileId, Io, Op, RangeLimits, RequestId, SocketIo, SocketIoKind, Source,
    SourceId, Token, Wait,
};
use fathom_nbd::protocol::{MAX_PAYLOAD, Replies, RequestHeader, command, command_flag};
use std::cell::RefCell;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

const SIZE: u64 = 8 << 20;
const REQUESTS: usize = 16;
const TAGS: [u8; 2] = [super::RECEIVE, super::SEND];

/// The socket operations in flight, by tag, and whether each is cancelled.
#[derive(Default)]
struct Wire {
    operations: [Option<SocketIo>; 2],
    cancelled: [bool; 2],
}

struct ScriptEngine {
    wire: Rc<RefCell<Wire>>,
    id: SourceId,
}

impl ScriptEngine {
    fn index(&self, token: Token) -> usize {
        let tag = TAGS.iter().position(|tag| self.id.token(*tag) == token);
        tag.expect("an operation of the source")
    }
}

impl Engine for ScriptEngine {
    fn name(&self) -> &'static str {
        "script"
    }

    fn reserve(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn add_file(&mut self, _: BorrowedFd<'_>) -> io::Result<FileId> {
        unreachable!("there is no file")
    }

    fn remove_file(&mut self, _: FileId) {}

    unsafe fn push(&mut self, _: Io, _: Token) {
        unreachable!("there is no file")
    }

    fn add_socket(&mut self, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    unsafe fn push_socket(&mut self, io: SocketIo, token: Token) {
        let index = self.index(token);
        let mut wire = self.wire.borrow_mut();
        assert!(wire.operations[index].is_none(), "one of a kind at a time");
        assert_eq!(io.kind == SocketIoKind::Send, index == 1);
        wire.operations[index] = Some(io);
        wire.cancelled[index] = false;
    }

    fn cancel_socket(&mut self, token: Token) {
        let index = self.index(token);
        self.wire.borrow_mut().cancelled[index] = true;
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

/// The input, read as the decisions of a client, a disk and a kernel.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u64 {
        u64::from(self.byte()) << 8 | u64::from(self.byte())
    }

    /// Appends a request, often a valid one, and its payload to `stream`.
    fn request(&mut self, replies: Replies, stream: &mut Vec<u8>) {
        let len = match self.byte() % 8 {
            0 => self.word(),
            1 => u64::from(self.byte()) << 24,
            2 => u64::from(self.byte()) << 16,
            _ => (1 + u64::from(self.byte()) % 64) * 512,
        };
        let odd = self.byte();
        let header = RequestHeader {
            flags: match odd {
                0..150 => 0,
                150..200 => command_flag::DF,
                _ => 1 << (odd % 16),
            },
            command: u16::from(self.byte()) % 9,
            cookie: self.word(),
            offset: self.word() * 512 + u64::from(odd == 7),
            len,
        };
        let header = RequestHeader {
            command: match header.command {
                // Keeps most connections from ending early.
                command::DISC if !odd.is_multiple_of(8) => command::WRITE,
                other => other,
            },
            ..header
        };
        header.put(replies, stream);
        if header.has_payload(replies) && len <= 1 << 20 {
            stream.extend((0..len).map(|n| n as u8 ^ odd));
        }
    }
}

struct Host {
    cx: Cx,
    source: NbdSource,
    wire: Rc<RefCell<Wire>>,
    /// Requests that the disk has not completed.
    held: Vec<RequestId>,
    /// Bytes that the client has sent and the server has not received.
    stream: Vec<u8>,
}

/// Checks that a client can do no more than end its own connection, however its bytes are split,
/// and that every command completes.
pub fn transmission(data: &[u8]) {
    let mut script = Script(data);
    let mut host = Host::new(script.byte());
    while !script.0.is_empty() {
        host.step(&mut script);
    }
    host.run_dry();
    host.end();
}

impl Host {
    fn new(how: u8) -> Host {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        drop(theirs); // the engine moves all bytes
        let limits = Some(RangeLimits {
            alignment: 512,
            max_len: 1 << 20,
        });
        let export = ExportView {
            name: "fuzz".into(),
            size: SIZE,
            minimum_block: 1,
            preferred_block: 4096,
            read_only: how & 4 != 0,
            write_cache: how & 8 != 0,
            discard: limits,
            write_zeroes: limits,
        };
        let agreed = Agreed {
            replies: match how % 3 {
                0 => Replies::Simple,
                1 => Replies::Structured,
                _ => Replies::Extended,
            },
            allocation_context: (!how.is_multiple_of(3)).then_some(0x0102),
            bitmap_context: None,
        };
        let stream = Stream {
            socket: ours.into(),
            tls: None,
            read_ahead: Vec::new(),
        };
        let limits = Limits {
            requests: REQUESTS,
            memory: Limits::MIN_MEMORY,
        };
        let source = NbdSource::new(stream, &export, agreed, limits, 0, Box::new(|| ()));
        let mut source = source.expect("a source");
        let wire = Rc::new(RefCell::new(Wire::default()));
        let id = SourceId::new(0, 1);
        let engine = ScriptEngine {
            wire: wire.clone(),
            id,
        };
        let mut cx = Cx::new(Box::new(engine));
        cx.slab.grow(REQUESTS);
        source.start(&mut cx, id).expect("started");
        Host {
            cx,
            source,
            wire,
            held: Vec::new(),
            stream: Vec::new(),
        }
    }

    fn step(&mut self, script: &mut Script<'_>) {
        let what = script.byte();
        match what % 16 {
            0..6 => script.request(self.source.agreed.replies, &mut self.stream),
            6 => {
                let len = usize::from(script.byte()).min(script.0.len());
                self.stream.extend(&script.0[..len]);
                script.0 = &script.0[len..];
            }
            7..10 => self.receive(1 + script.word() as usize * 4),
            10 => self.receive(usize::MAX),
            11 | 12 => self.answer(script.byte()),
            13 => self.send(1 + script.word() as usize * 16),
            14 => self.send(usize::MAX),
            _ if script.byte() < 8 => self.complete(usize::from(what >> 4 & 1), -libc::ECONNRESET),
            _ => {}
        }
        self.turn();
    }

    /// Does what a worker does in one iteration, except for executing the requests.
    fn turn(&mut self) {
        let mut batch = Vec::new();
        let room = REQUESTS - self.held.len();
        if room > 0 {
            let popped = self.source.pop(&mut self.cx, room, &mut batch);
            popped.expect("a connection breaks by itself");
        }
        assert!(batch.len() <= room);
        batch.iter().for_each(|id| self.check(*id));
        self.held.extend(batch);
        self.source.publish(&mut self.cx);
    }

    fn check(&self, id: RequestId) {
        let request = &self.cx.slab[id];
        assert!(request.offset + request.len <= SIZE);
        let bytes: usize = request.segments.iter().map(|s| s.iov_len).sum();
        match request.op {
            Op::Read | Op::Write => assert_eq!(bytes as u64, request.len),
            Op::BlockStatus => assert!(bytes >= 8),
            _ => assert_eq!(bytes, 0),
        }
        assert!(request.op == Op::Flush || request.len > 0);
        assert!(request.len <= u64::from(MAX_PAYLOAD));
    }

    /// Completes one of the requests that the disk holds.
    fn answer(&mut self, which: u8) {
        if self.held.is_empty() {
            return;
        }
        let id = self.held.swap_remove(usize::from(which) % self.held.len());
        let request = &mut self.cx.slab[id];
        request.error = if which > 240 { libc::EIO } else { 0 };
        for segment in &request.segments {
            let at = segment.iov_base.cast::<u8>();
            // SAFETY: the source guarantees that its segments are valid.
            unsafe {
                match request.op {
                    Op::Read => at.write_bytes(which % 2, segment.iov_len),
                    Op::BlockStatus => {
                        at.write_bytes(0, segment.iov_len);
                        at.cast::<u64>().write_unaligned(request.len << 2 | 3);
                    }
                    _ => drop(std::slice::from_raw_parts(at, segment.iov_len).to_vec()),
                }
            }
        }
        self.source.finish(&self.cx.slab[id]);
        self.cx.slab.put(id);
    }

    /// Completes a receive with at most `most` bytes.
    fn receive(&mut self, most: usize) {
        let Some(io) = self.wire.borrow().operations[0] else {
            return;
        };
        let most = most.min(self.stream.len());
        let mut received = 0;
        for segment in iovecs(&io) {
            let len = segment.iov_len.min(most - received);
            let from = &self.stream[received..received + len];
            // SAFETY: the source guarantees that its messages are valid.
            unsafe { segment.iov_base.cast::<u8>().copy_from(from.as_ptr(), len) };
            received += len;
        }
        if received > 0 {
            self.stream.drain(..received);
            self.complete(0, received as i32);
        }
    }

    /// Completes a send with at most `most` bytes.
    fn send(&mut self, most: usize) {
        let Some(io) = self.wire.borrow().operations[1] else {
            return;
        };
        let mut sent = 0;
        for segment in iovecs(&io) {
            assert!(segment.iov_len > 0);
            // SAFETY: the source guarantees that its messages are valid.
            let bytes = unsafe {
                std::slice::from_raw_parts(segment.iov_base.cast::<u8>(), segment.iov_len)
            };
            std::hint::black_box(bytes.iter().fold(0u8, |all, byte| all ^ byte));
            sent += segment.iov_len;
        }
        let sent = sent.min(most);
        self.complete(1, sent as i32);
    }

    fn complete(&mut self, index: usize, result: i32) {
        if self.wire.borrow_mut().operations[index].take().is_some() {
            self.source.completed(&mut self.cx, TAGS[index], result);
        }
    }

    /// Reads all replies and completes all requests until nothing changes.
    ///
    /// A connection that is still served has then received every byte. The connection owes a reply
    /// only to a command whose payload the client has not sent.
    fn run_dry(&mut self) {
        let mut idle = 0;
        while idle < 4 {
            let before = (
                self.stream.len(),
                self.source.answered,
                self.source.table.used(),
                self.source.outbox.waiting(),
            );
            self.receive(usize::MAX);
            self.turn();
            while !self.held.is_empty() {
                self.answer(0);
                idle = 0;
            }
            self.source.publish(&mut self.cx);
            self.send(usize::MAX);
            let now = (
                self.stream.len(),
                self.source.answered,
                self.source.table.used(),
                self.source.outbox.waiting(),
            );
            idle = if now == before { idle + 1 } else { 0 };
        }
        if self.source.serving {
            let payload = self.source.payload.as_ref();
            let owed = payload.is_some_and(|payload| payload.command.is_some());
            assert_eq!(
                self.source.table.used(),
                usize::from(owed),
                "commands that wait for ever"
            );
            assert!(self.stream.is_empty(), "bytes that are never received");
        }
    }

    /// Stops the source, completes everything in flight, and checks that all resources are free.
    fn end(mut self) {
        while !self.held.is_empty() {
            self.answer(0);
        }
        self.source.publish(&mut self.cx);
        self.source.stop(&mut self.cx);
        while !self.held.is_empty() {
            self.answer(0);
        }
        self.source.publish(&mut self.cx);
        for _ in 0..4 {
            for index in [0, 1] {
                if self.wire.borrow().cancelled[index] {
                    self.complete(index, -libc::ECANCELED);
                }
            }
        }
        assert!(self.source.has_stopped());
        assert_eq!(self.source.table.used(), 0);
        assert_eq!(self.source.split_in_flight, 0);
        assert_eq!(self.source.outbox.waiting(), 0);
        // All memory is free except for the block that the inbox receives into.
        assert_eq!(self.source.pool.used(), super::pool::BLOCK);
    }
}

fn iovecs(io: &SocketIo) -> Vec<libc::iovec> {
    // SAFETY: the source guarantees that its messages are valid.
    let iovecs = unsafe {
        let message = &*io.message;
        std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen as _)
    };
    assert!((1..=1024).contains(&iovecs.len()));
    iovecs.to_vec()
}
