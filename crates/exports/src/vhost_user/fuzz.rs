//! Bodies of fuzz targets: a front-end can do no more than end its own connection. Not a public
//! interface.

use super::VhostUser;
use super::codec::{Header, MAX_FDS, Received, Receiver, Request};
use super::serve::{Connection, Progress};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Feeds the bytes of a connection to the codec, with as many file descriptors as the first byte
/// says.
pub fn codec(data: &[u8]) {
    let Some((count, bytes)) = data.split_first() else {
        return;
    };
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    // Bytes that fit into the socket.
    let bytes = &bytes[..bytes.len().min(32 << 10)];
    let files: Vec<OwnedFd> = (0..count % (MAX_FDS as u8 + 3)).map(|_| event()).collect();
    send_with(&theirs, bytes, &files);
    drop(theirs);
    let mut receiver = Receiver::default();
    while let Ok(Received::Frame(frame)) = receiver.receive(&ours) {
        assert!(frame.payload.len() == frame.header.size as usize);
        assert!(frame.fds.len() <= MAX_FDS);
        let _ = Request::parse(frame);
    }
}

/// Sends a sequence of messages, most of them nearly valid, to a session.
pub fn session(export: &VhostUser, data: &[u8]) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    theirs.set_nonblocking(true).expect("a socket");
    let mut connection = Connection::new(&export.shared, ours).expect("a session");
    let mut script = Script::new(data);
    let prepared = !script.byte().is_multiple_of(4);
    if prepared {
        script.prepare(&theirs);
    }
    while !script.is_over() {
        script.send_message(&theirs);
        match connection.handle_messages() {
            Ok(Progress::Idle | Progress::More) => {}
            Ok(Progress::Closed) | Err(_) => break,
        }
        // Replies are drained, so that they do not fill the socket.
        while (&theirs).read(&mut [0; 8192]).is_ok_and(|n| n > 0) {}
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

fn send_with(socket: &UnixStream, bytes: &[u8], files: &[OwnedFd]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // The other side may have closed the connection.
    let _ = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags);
}

const MEMORY_SIZE: u64 = 256 << 10;
const GUEST_ADDR: u64 = 0x10_0000;
const USER_ADDR: u64 = 0x7f00_0000_0000;

/// Fuzz input, read as instructions.
struct Script<'a> {
    data: &'a [u8],
    /// File of the guest's memory, also passed for other kinds of memory.
    memory: OwnedFd,
}

impl<'a> Script<'a> {
    fn new(data: &'a [u8]) -> Script<'a> {
        let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&memory, MEMORY_SIZE).expect("a memory file");
        // The input is also the contents of the rings.
        let _ = rustix::io::pwrite(&memory, data, 0);
        Script { data, memory }
    }

    /// Sets up vring 0, so that later messages have something to disturb.
    fn prepare(&self, socket: &UnixStream) {
        let send = |request: u32, words: &[u64], payload: &[u8], files: &[OwnedFd]| {
            let mut payload = payload.to_vec();
            words.iter().for_each(|w| payload.extend(w.to_ne_bytes()));
            let mut message = Header::request(request, payload.len(), false)
                .to_bytes()
                .to_vec();
            message.extend(payload);
            send_with(socket, &message, files);
        };
        let memory = || self.memory.try_clone().expect("a file descriptor");
        let state = |num: u64| num << 32;
        send(16, &[0x1b22b], &[], &[]);
        send(2, &[1 << 32 | 1 << 30], &[], &[]);
        let region = [1, GUEST_ADDR, MEMORY_SIZE, USER_ADDR, 0];
        send(5, &region, &[], &[memory()]);
        send(8, &[state(64)], &[], &[]);
        let rings = [
            USER_ADDR,
            USER_ADDR + 0x4000,
            USER_ADDR + 0x8000,
            GUEST_ADDR,
        ];
        send(9, &rings, &[0; 8], &[]);
        send(13, &[0], &[], &[event()]);
        send(12, &[0], &[], &[event()]);
        send(18, &[state(1)], &[], &[]);
    }

    fn is_over(&self) -> bool {
        self.data.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.data.split_first() else {
            return 0;
        };
        self.data = rest;
        *first
    }

    /// Returns one of the values, or sometimes an odd one.
    fn pick<T: Copy>(&mut self, values: &[T], other: impl Fn(u8) -> T) -> T {
        match self.byte() {
            odd @ 0xf8.. => other(odd),
            n => values[usize::from(n) % values.len()],
        }
    }

    fn u64(&mut self, values: &[u64]) -> [u8; 8] {
        let odd =
            |n| [0, 1, u64::MAX, 1 << 63, 0x1000, 0xfff, 1 << 32, 1 << 12][usize::from(n & 7)];
        self.pick(values, odd).to_ne_bytes()
    }

    fn u32(&mut self, values: &[u32]) -> [u8; 4] {
        let odd = |n| [0, 1, u32::MAX, 1 << 31, 255, 256, 1 << 16, 7][usize::from(n & 7)];
        self.pick(values, odd).to_ne_bytes()
    }

    fn region(&mut self) -> Vec<u8> {
        let mut region = Vec::new();
        let part = u64::from(self.byte() % 4) * (MEMORY_SIZE / 4);
        region.extend(self.u64(&[GUEST_ADDR + part]));
        region.extend(self.u64(&[MEMORY_SIZE / 4, MEMORY_SIZE / 4, MEMORY_SIZE]));
        region.extend(self.u64(&[USER_ADDR + part]));
        region.extend(self.u64(&[part]));
        region
    }

    fn file(&mut self) -> OwnedFd {
        match self.byte() {
            0xf8..=0xfa => UnixStream::pair().expect("a socket pair").0.into(),
            0xfb..=0xfc => std::fs::File::open("/dev/null").expect("/dev/null").into(),
            n if n % 2 == 0 => self.memory.try_clone().expect("a file descriptor"),
            _ => event(),
        }
    }

    fn files(&mut self, usual: u8) -> Vec<OwnedFd> {
        let count = self.pick(&[usual], |odd| odd & 7);
        (0..count).map(|_| self.file()).collect()
    }

    fn vring_addr(&mut self) -> Vec<u8> {
        let mut addr = self.u32(&[0, 1]).to_vec();
        addr.extend(self.u64(&[USER_ADDR, USER_ADDR + 0x1_0000]));
        addr.extend(self.u64(&[USER_ADDR + 0x4000, USER_ADDR + 0x2_0000]));
        addr.extend(self.u64(&[USER_ADDR + 0x8000, USER_ADDR + 0x3_0000]));
        addr.extend(self.u64(&[GUEST_ADDR + 0x4000]));
        addr
    }

    fn inflight(&mut self) -> Vec<u8> {
        let mut area = self.u64(&[0x8000, 0x1_0000]).to_vec();
        area.extend(self.u64(&[0, 0, 0x1000]));
        area.extend([self.byte() % 8, 0, self.byte(), self.byte() & 7]);
        area.resize(24, 0);
        area
    }

    /// Returns a more or less valid payload and files for a request.
    fn payload(&mut self, request: u32) -> (Vec<u8>, Vec<OwnedFd>) {
        let index = |s: &mut Self| s.u32(&[0, 1, 2]).to_vec();
        match request {
            2 => (
                self.u64(&[1 << 32 | 1 << 30, 1 << 32, 1 << 30 | 1 << 26])
                    .to_vec(),
                vec![],
            ),
            5 => {
                let count = self.byte() % 5;
                let mut table = vec![count, 0, 0, 0, 0, 0, 0, 0];
                (0..count).for_each(|_| table.extend(self.region()));
                (table, self.files(count))
            }
            6 => {
                let mut log = self.u64(&[0x1000, 0x10]).to_vec();
                log.extend(self.u64(&[0, 0x2000]));
                (log, self.files(1))
            }
            8 | 10 | 11 | 18 => {
                let mut state = index(self);
                state.extend(self.u32(&[1, 0, 16, 64, 128, 1024]));
                (state, vec![])
            }
            9 => {
                let mut addr = index(self);
                addr.extend(self.vring_addr());
                (addr, vec![])
            }
            12..=14 => (self.u64(&[0, 1, 2]).to_vec(), self.files(1)),
            16 => (self.u64(&[0x1b22b, 0x8]).to_vec(), vec![]),
            24 | 25 => {
                let mut config = self.u32(&[0, 32, 0x100]).to_vec();
                config.extend(self.u32(&[1, 60]));
                config.extend(self.u32(&[0, 1]));
                config.push(self.byte());
                (config, vec![])
            }
            31 => (self.inflight(), vec![]),
            32 => (self.inflight(), self.files(1)),
            37 | 38 => {
                let mut region = vec![0; 8];
                region.extend(self.region());
                (region, self.files(38 - request as u8))
            }
            39 => (self.u64(&[0, 1, 0xf]).to_vec(), vec![]),
            _ => (vec![], self.files(u8::from(matches!(request, 7 | 21)))),
        }
    }

    fn send_message(&mut self, socket: &UnixStream) {
        let request = match self.byte() {
            // Truncates the memory, or grows it again.
            0xff => {
                let size = u64::from(self.byte()) << 10;
                return ftruncate(&self.memory, size).expect("a memory file");
            }
            odd @ 0xf0.. => u32::from(odd),
            n => u32::from(n % 41),
        };
        let (mut payload, files) = self.payload(request);
        if self.byte() >= 0xfa {
            let len = usize::from(self.byte());
            payload.resize(len, 0x55);
        }
        // Without an acknowledgement, a refused request ends the session.
        let mut header = Header::request(request, payload.len(), !self.byte().is_multiple_of(8));
        if self.byte() >= 0xfc {
            header.flags ^= u32::from(self.byte());
        }
        let mut message = header.to_bytes().to_vec();
        message.extend(payload);
        send_with(socket, &message, &files);
    }
}
