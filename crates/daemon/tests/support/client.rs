//! A client that takes the protocol's text at its word, and shares nothing
//! with the server but the requests' headers.

use fathom_nbd::protocol::{Replies, RequestHeader, command, command_flag};
use fathom_testing::PATIENCE;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// A whole reply.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Reply {
    /// 0 or the error.
    pub error: u32,
    pub text: String,
    /// Offset of an error, if the reply has one.
    pub at: Option<u64>,
    /// (offset, data) in order of arrival; holes as zeroes.
    pub data: Vec<(u64, Vec<u8>)>,
    pub holes: usize,
    /// (context, extents).
    pub extents: Vec<(u32, Vec<(u64, u64)>)>,
    pub chunks: usize,
}

impl Reply {
    /// Returns the data of a read in one piece. Panics unless the data has `len` bytes without
    /// gaps.
    pub fn bytes(mut self, offset: u64, len: usize) -> Vec<u8> {
        assert_eq!(self.error, 0, "{}", self.text);
        self.data.sort_by_key(|(at, _)| *at);
        let mut all = Vec::new();
        for (at, data) in self.data {
            assert_eq!(at, offset + all.len() as u64, "no gap, no overlap");
            all.extend(data);
        }
        assert_eq!(all.len(), len);
        all
    }
}

pub struct Client {
    pub stream: UnixStream,
    pub replies: Replies,
    next_cookie: u64,
    /// The request of each cookie: (command, offset, len).
    sent: HashMap<u64, (u16, u64, u64)>,
    partial: HashMap<u64, Reply>,
}

impl Client {
    pub fn new(stream: UnixStream, replies: Replies) -> Client {
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        stream.set_write_timeout(Some(PATIENCE)).expect("set");
        Client {
            stream,
            replies,
            next_cookie: 0x1122_3344_5566_0000,
            sent: HashMap::new(),
            partial: HashMap::new(),
        }
    }

    /// The bytes of a request, without payload.
    pub fn header(&mut self, command: u16, flags: u16, offset: u64, len: u64) -> (u64, Vec<u8>) {
        self.next_cookie += 1;
        let cookie = self.next_cookie;
        self.sent.insert(cookie, (command, offset, len));
        let wide = self.replies == Replies::Extended && command == command::WRITE;
        let header = RequestHeader {
            flags: flags | if wide { command_flag::PAYLOAD_LEN } else { 0 },
            command,
            cookie,
            offset,
            len,
        };
        let mut bytes = Vec::new();
        header.put(self.replies, &mut bytes);
        (cookie, bytes)
    }

    /// The last request was not sent.
    pub fn forget_last(&mut self) {
        self.sent.remove(&self.next_cookie);
    }

    /// A reply with this cookie may come.
    pub fn expect(&mut self, cookie: u64, command: u16) {
        self.expect_at(cookie, command, 0);
    }

    pub fn expect_at(&mut self, cookie: u64, command: u16, offset: u64) {
        self.sent.insert(cookie, (command, offset, 0));
    }

    pub fn send(&mut self, command: u16, flags: u16, offset: u64, len: u64) -> u64 {
        let (cookie, bytes) = self.header(command, flags, offset, len);
        self.stream.write_all(&bytes).expect("sent");
        cookie
    }

    pub fn send_write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u64 {
        let (cookie, mut bytes) = self.header(command::WRITE, flags, offset, data.len() as u64);
        bytes.extend(data);
        self.stream.write_all(&bytes).expect("sent");
        cookie
    }

    pub fn call(&mut self, command: u16, flags: u16, offset: u64, len: u64) -> Reply {
        let cookie = self.send(command, flags, offset, len);
        self.reply_to(cookie)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Reply {
        let cookie = self.send_write(0, offset, data);
        self.reply_to(cookie)
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.call(command::READ, 0, offset, len as u64)
            .bytes(offset, len)
    }

    pub fn disconnect(&mut self) {
        self.send(command::DISC, 0, 0, 0);
    }

    /// The next reply must be to this.
    pub fn reply_to(&mut self, cookie: u64) -> Reply {
        let (got, reply) = self.reply();
        assert_eq!(got, cookie);
        reply
    }

    fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("a reply");
        bytes
    }

    /// The end of the stream comes next.
    pub fn expect_end(&mut self) {
        assert_eq!(self.stream.read(&mut [0; 16]).expect("the end"), 0);
    }

    /// The next reply that is complete.
    pub fn reply(&mut self) -> (u64, Reply) {
        loop {
            let magic = u32_of(&self.take(4));
            if magic == 0x67446698 {
                assert_ne!(self.replies, Replies::Extended);
                return self.simple_reply();
            }
            let (done, cookie) = match magic {
                0x668e33ef if self.replies == Replies::Structured => self.chunk(16),
                0x6e8a278c if self.replies == Replies::Extended => self.chunk(28),
                other => panic!("{other:#x} is no reply"),
            };
            if done {
                let (command, offset, len) = self.sent.remove(&cookie).expect("a request");
                let reply = self.partial.remove(&cookie).expect("chunks");
                if command == command::READ && reply.error == 0 {
                    let inside = |(at, data): &(u64, Vec<u8>)| {
                        *at >= offset && at + data.len() as u64 <= offset + len
                    };
                    assert!(reply.data.iter().all(inside));
                }
                return (cookie, reply);
            }
        }
    }

    fn simple_reply(&mut self) -> (u64, Reply) {
        let rest = self.take(12);
        let (error, cookie) = (u32_of(&rest[..4]), u64_of(&rest[4..]));
        let (command, offset, len) = self.sent.remove(&cookie).expect("a request");
        let mut reply = Reply {
            error,
            ..Reply::default()
        };
        if command == command::READ {
            assert_eq!(self.replies, Replies::Simple, "a read has chunks");
            if error == 0 {
                reply.data.push((offset, self.take(len as usize)));
            }
        }
        (cookie, reply)
    }

    fn chunk(&mut self, rest: usize) -> (bool, u64) {
        let rest = self.take(rest);
        let (flags, kind) = (u16_of(&rest[..2]), u16_of(&rest[2..4]));
        let cookie = u64_of(&rest[4..12]);
        let len = match self.replies {
            Replies::Extended => {
                assert_eq!(u64_of(&rest[12..20]), self.sent[&cookie].1, "its offset");
                u64_of(&rest[20..28])
            }
            _ => u32_of(&rest[12..16]).into(),
        };
        let payload = self.take(len as usize);
        let reply = self.partial.entry(cookie).or_default();
        reply.chunks += 1;
        match kind {
            0 => assert!(payload.is_empty() && flags == 1),
            1 => {
                assert!(payload.len() > 8);
                let data = payload[8..].to_vec();
                reply.data.push((u64_of(&payload[..8]), data));
            }
            2 => {
                assert_eq!(payload.len(), 12);
                let data = vec![0; u32_of(&payload[8..]) as usize];
                assert!(!data.is_empty());
                reply.data.push((u64_of(&payload[..8]), data));
                reply.holes += 1;
            }
            5 => {
                assert_eq!(self.replies, Replies::Structured);
                let extents = payload[4..].chunks_exact(8);
                let extents = extents.map(|e| (u32_of(&e[..4]).into(), u32_of(&e[4..]).into()));
                reply
                    .extents
                    .push((u32_of(&payload[..4]), extents.collect()));
            }
            6 => {
                assert_eq!(self.replies, Replies::Extended);
                assert_eq!(u32_of(&payload[4..8]) as usize * 16 + 8, payload.len());
                let extents = payload[8..].chunks_exact(16);
                let extents = extents.map(|e| (u64_of(&e[..8]), u64_of(&e[8..])));
                reply
                    .extents
                    .push((u32_of(&payload[..4]), extents.collect()));
            }
            0x8001 | 0x8002 => {
                reply.error = u32_of(&payload[..4]);
                assert_ne!(reply.error, 0);
                let end = 6 + usize::from(u16_of(&payload[4..6]));
                reply.text = String::from_utf8(payload[6..end].to_vec()).expect("text");
                let at = &payload[end..];
                assert_eq!(at.len(), if kind == 0x8001 { 0 } else { 8 });
                reply.at = (kind == 0x8002).then(|| u64_of(at));
            }
            other => panic!("a chunk of type {other}"),
        }
        (flags & 1 != 0, cookie)
    }
}

fn u16_of(bytes: &[u8]) -> u16 {
    u16::from_be_bytes(bytes.try_into().expect("2 bytes"))
}

fn u32_of(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes.try_into().expect("4 bytes"))
}

fn u64_of(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes.try_into().expect("8 bytes"))
}
