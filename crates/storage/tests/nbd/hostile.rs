//! Tests servers that violate the protocol.

use crate::common::Ask;
use crate::server::{guest, short_dir, uri};
use fathom_core::Op;
use fathom_nbd::protocol::{ChunkHeader, Replies, RequestHeader};
use fathom_storage::{EngineKind, NbdDisk, NbdOptions};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const SIZE: u64 = 16 << 20;

/// HAS_FLAGS and all flags except READ_ONLY: FLUSH, FUA, TRIM, WRITE_ZEROES, CAN_MULTI_CONN.
pub const ALL_FLAGS: u16 = 0x016d;
const FUA: u16 = 1 << 3;

fn number<const N: usize>(stream: &mut UnixStream) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).ok().map(|()| bytes)
}

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
    for n in [option, kind, data.len() as u32] {
        bytes.extend(n.to_be_bytes());
    }
    bytes.extend(data);
    bytes
}

fn number_at(bytes: &[u8], at: usize) -> usize {
    fathom_nbd::protocol::u32_at(bytes, at) as usize
}

/// Performs the server's side of the handshake.
pub fn shake(stream: &mut UnixStream, replies: Replies, flags: u16) -> Option<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").ok()?;
    number::<4>(stream)?;
    loop {
        number::<8>(stream)?;
        let option = u32::from_be_bytes(number(stream)?);
        let len = u32::from_be_bytes(number(stream)?);
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data).ok()?;
        let mut out = Vec::new();
        match option {
            7 => {
                let mut export = vec![0, 0];
                export.extend(SIZE.to_be_bytes());
                export.extend(flags.to_be_bytes());
                out.extend(option_reply(option, 3, &export));
                out.extend(option_reply(option, 1, &[]));
            }
            11 if replies != Replies::Extended => {
                out.extend(option_reply(option, 0x8000_0001, &[]));
            }
            8 | 10 if replies == Replies::Simple => {
                out.extend(option_reply(option, 0x8000_0001, &[]));
            }
            10 => {
                // The query follows the export's name, the number of queries, and the query's
                // length.
                let query = &data[4 + number_at(&data, 0) + 4 + 4..];
                let context = [&7u32.to_be_bytes()[..], query].concat();
                out.extend(option_reply(option, 4, &context));
                out.extend(option_reply(option, 1, &[]));
            }
            _ => out.extend(option_reply(option, 1, &[])),
        }
        stream.write_all(&out).ok()?;
        if option == 7 {
            return Some(());
        }
    }
}

/// Receives the next request, without its data.
fn header(stream: &mut UnixStream, replies: Replies) -> Option<RequestHeader> {
    let mut bytes = vec![0; replies.request_len()];
    stream.read_exact(&mut bytes).ok()?;
    RequestHeader::parse(replies, &bytes).ok()
}

pub fn next(stream: &mut UnixStream, replies: Replies) -> Option<RequestHeader> {
    let asked = header(stream, replies)?;
    if asked.command == 1 {
        stream.read_exact(&mut vec![0; asked.len as usize]).ok()?;
    }
    Some(asked)
}

/// Makes options with which requests do not wait for a disconnected server.
fn at_once() -> NbdOptions {
    NbdOptions {
        reconnect: Some(Duration::ZERO),
        ..NbdOptions::default()
    }
}

/// Makes a disk on a server with these replies on every connection; an empty reply closes it.
/// Requests of the disk do not wait for a reconnection.
fn disk_of(
    replies: Replies,
    answer: impl Fn(&RequestHeader) -> Vec<u8> + Send + 'static,
) -> (Arc<NbdDisk>, TempDir) {
    disk_with(replies, at_once(), answer)
}

fn disk_with(
    replies: Replies,
    options: NbdOptions,
    answer: impl Fn(&RequestHeader) -> Vec<u8> + Send + 'static,
) -> (Arc<NbdDisk>, TempDir) {
    let dir = short_dir();
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            if shake(&mut stream, replies, ALL_FLAGS).is_none() {
                continue;
            }
            while let Some(asked) = next(&mut stream, replies) {
                let bytes = answer(&asked);
                if bytes.is_empty() || stream.write_all(&bytes).is_err() {
                    break;
                }
            }
        }
    });
    let disk = NbdDisk::connect(&uri(&socket), options);
    (Arc::new(disk.expect("connected")), dir)
}

fn simple(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = 0x6744_6698u32.to_be_bytes().to_vec();
    bytes.extend(error.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(data);
    bytes
}

fn chunk(flags: u16, kind: u16, cookie: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = 0x668e_33efu32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend((body.len() as u32).to_be_bytes());
    bytes.extend(body);
    bytes
}

fn data(offset: u64, bytes: &[u8]) -> Vec<u8> {
    [&offset.to_be_bytes()[..], bytes].concat()
}

fn hole(offset: u64, len: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat()
}

/// Checks that a read of 4096 bytes at 8192 fails, and that the memory around its buffer is
/// unchanged.
fn read_fails(replies: Replies, answer: impl Fn(&RequestHeader) -> Vec<u8> + Send + 'static) {
    let (disk, _dir) = disk_of(replies, answer);
    let mut guest = guest(&disk, EngineKind::IoUring);
    for _ in 0..2 {
        let mut ask = Ask::read(8192, 3 * 4096);
        ask.len = 4096;
        let (start, _) = ask.segments[0];
        ask.segments = vec![(start + 4096, 1000), (start + 5200, 3096)];
        let (errno, ask) = guest.run(ask);
        assert_eq!(errno, libc::EIO);
        let memory = &ask.memory.bytes()[start..start + 3 * 4096];
        let untouched = |range: std::ops::Range<usize>| memory[range].iter().all(|b| *b == 0xa5);
        assert!(untouched(0..4096) && untouched(5096..5200) && untouched(8296..12288));
    }
    guest.detach();
}

#[test]
fn lies_about_reads_end_the_connection() {
    type Answer = fn(&RequestHeader) -> Vec<u8>;
    const DATA: [u8; 4096] = [1; 4096];
    let structured: [Answer; 17] = [
        // A reply to another request.
        |a| chunk(1, 1, a.cookie + 1, &data(a.offset, &DATA)),
        |a| chunk(1, 1, a.cookie + (1 << 32), &data(a.offset, &DATA)),
        // Other bytes than requested.
        |a| chunk(1, 1, a.cookie, &data(a.offset - 1, &DATA)),
        |a| chunk(1, 1, a.cookie, &data(a.offset + 1, &DATA)),
        |a| chunk(1, 1, a.cookie, &data(u64::MAX, &DATA)),
        |a| chunk(1, 1, a.cookie, &data(a.offset, &[1; 4097])),
        |a| chunk(1, 2, a.cookie, &hole(a.offset, 4097)),
        |a| chunk(1, 2, a.cookie, &hole(a.offset + 1, u32::MAX)),
        |a| chunk(1, 2, a.cookie, &hole(a.offset, 0)),
        // Too few bytes.
        |a| chunk(1, 1, a.cookie, &data(a.offset, &DATA[1..])),
        |a| chunk(1, 0, a.cookie, &[]),
        |a| simple(0, a.cookie, &DATA),
        // The same bytes twice.
        |a| {
            let first = chunk(0, 1, a.cookie, &data(a.offset, &DATA[..2048]));
            let second = chunk(1, 1, a.cookie, &data(a.offset + 2047, &DATA[..2049]));
            [first, second].concat()
        },
        |a| {
            let first = chunk(0, 1, a.cookie, &data(a.offset, &DATA));
            let second = chunk(1, 2, a.cookie, &hole(a.offset, 1));
            [first, second].concat()
        },
        // Chunks that do not answer reads, and data that is not a reply.
        |a| chunk(1, 5, a.cookie, &[0, 0, 0, 7, 0, 0, 16, 0, 0, 0, 0, 0]),
        |a| chunk(1, 77, a.cookie, &[]),
        |_| b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
    ];
    for answer in structured {
        read_fails(Replies::Structured, answer);
    }
    let plain: [Answer; 3] = [
        |a| simple(0, a.cookie ^ 1, &DATA),
        |a| chunk(1, 1, a.cookie, &data(a.offset, &DATA)),
        |_| Vec::new(),
    ];
    for answer in plain {
        read_fails(Replies::Simple, answer);
    }
}

/// Makes a chunk with extended headers.
fn wide(flags: u16, kind: u16, asked: &RequestHeader, offset: u64, body: &[u8]) -> Vec<u8> {
    let header = ChunkHeader {
        flags,
        kind,
        cookie: asked.cookie,
        offset,
        len: body.len() as u64,
    };
    [&header.extended()[..], body].concat()
}

#[test]
fn lies_in_extended_replies_end_the_connection() {
    type Answer = fn(&RequestHeader) -> Vec<u8>;
    const DATA: [u8; 4096] = [1; 4096];
    let answers: [Answer; 6] = [
        |a| wide(1, 1, a, a.offset + 1, &data(a.offset, &DATA)),
        |a| wide(1, 1, a, a.offset, &data(a.offset + 1, &DATA)),
        |a| wide(1, 1, a, a.offset, &data(a.offset, &DATA[1..])),
        |a| wide(1, 6, a, a.offset, &[0; 24]),
        // A chunk of more than 4 GiB, and a structured chunk instead of an extended one.
        |a| {
            let mut bytes = wide(1, 1, a, a.offset, &data(a.offset, &DATA));
            bytes[27] = 1;
            bytes
        },
        |a| chunk(1, 1, a.cookie, &data(a.offset, &DATA)),
    ];
    for answer in answers {
        read_fails(Replies::Extended, answer);
    }
    // Block status chunks with more or fewer extents than announced, or of the wrong type.
    for (kind, count, sent) in [(6, 2u32, 1), (6, 0, 1), (6, 1, 2), (5, 1, 1)] {
        let (disk, _dir) = disk_of(Replies::Extended, move |a| {
            let head = [7u32.to_be_bytes(), count.to_be_bytes()].concat();
            let extents = [&512u64.to_be_bytes()[..], &[0; 8]].concat().repeat(sent);
            wide(1, kind, a, a.offset, &[head, extents].concat())
        });
        let mut client = guest(&disk, EngineKind::IoUring);
        let mut ask = Ask::read(0, 4096);
        (ask.op, ask.len) = (Op::BlockStatus, SIZE);
        ask.segments[0].1 = 64;
        assert_eq!(client.run(ask).0, libc::EIO, "{kind} {count} {sent}");
        client.detach();
    }
}

/// A server that is found again and again, and lost with each request: the guest's request does not
/// wait forever, and no thread spins.
#[test]
fn a_server_that_always_hangs_up_is_not_tried_without_end() {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    let options = NbdOptions {
        reconnect: Some(Duration::from_secs(2)),
        ..NbdOptions::default()
    };
    let (disk, _dir) = disk_with(Replies::Simple, options, |_| {
        TRIED.fetch_add(1, Ordering::Relaxed);
        Vec::new()
    });
    let mut guest = guest(&disk, EngineKind::IoUring);
    let started = Instant::now();
    assert_eq!(guest.read(0, 4096), Err(libc::EIO));
    assert!(started.elapsed() >= Duration::from_secs(2));
    assert!((2..12).contains(&TRIED.load(Ordering::Relaxed)));
    guest.detach();
}

/// The channel flushes by itself when many writes are not flushed, so that it can keep them all.
#[test]
fn what_nobody_flushes_is_flushed_in_time() {
    let (seen, told) = std::sync::mpsc::channel();
    let serve = move |mut stream: UnixStream| {
        while let Some(asked) = next(&mut stream, Replies::Simple) {
            seen.send(asked.command).expect("told");
            let sent = stream.write_all(&simple(0, asked.cookie, &[]));
            sent.expect("sent");
        }
    };
    let (disk, _dir) = disk_by(ALL_FLAGS, NbdOptions::default(), serve);
    let mut client = guest(&disk, EngineKind::IoUring);
    let data = vec![1; 1 << 20];
    for _ in 0..200 {
        assert_eq!(client.write(0, &data), 0);
    }
    client.detach();
    drop(disk);
    let flushes = told.iter().filter(|command| *command == 3).count();
    assert!((4..=10).contains(&flushes), "{flushes}");
}

/// NBD_ESHUTDOWN is not a result of the request, which is sent to the next server.
#[test]
fn a_request_outlives_the_end_of_its_server() {
    for structured in [false, true] {
        let replies = [Replies::Simple, Replies::Structured][usize::from(structured)];
        let asked = AtomicU32::new(0);
        let (disk, _dir) = disk_with(replies, NbdOptions::default(), move |a| {
            let is_first = asked.fetch_add(1, Ordering::Relaxed) == 0;
            match (is_first, structured) {
                (true, true) => chunk(1, 0x8001, a.cookie, &[0, 0, 0, 108, 0, 0]),
                (true, false) => simple(108, a.cookie, &[]),
                (false, _) => simple(0, a.cookie, &[]),
            }
        });
        let mut guest = guest(&disk, EngineKind::IoUring);
        assert_eq!(guest.write(0, &[1; 512]), 0);
        guest.detach();
    }
}

/// A server whose flushes fail gets no more writes than can be kept.
#[test]
fn writes_fail_in_the_end_where_no_flush_succeeds() {
    let (disk, _dir) = disk_of(Replies::Simple, |a| match a.command {
        3 => simple(5, a.cookie, &[]),
        _ => simple(0, a.cookie, &[]),
    });
    let mut client = guest(&disk, EngineKind::IoUring);
    let data = vec![1; 1 << 20];
    let written = (0..200).take_while(|_| client.write(0, &data) == 0).count();
    assert!((20..70).contains(&written), "{written}");
    client.detach();
}

#[test]
fn errors_that_make_no_sense_end_the_connection() {
    type Answer = fn(&RequestHeader) -> Vec<u8>;
    let answers: [Answer; 5] = [
        // Error number 0, a text longer than its chunk, no length.
        |a| chunk(1, 0x8001, a.cookie, &[0, 0, 0, 0, 0, 0]),
        |a| chunk(1, 0x8001, a.cookie, &[0, 0, 0, 5, 0, 9, b'x']),
        |a| chunk(1, 0x8001, a.cookie, &[0, 0, 0, 5]),
        |a| chunk(1, 0x8002, a.cookie, &[0, 0, 0, 5, 0, 0]),
        |a| chunk(1, 0x8001, a.cookie, &[1; 5000]),
    ];
    for answer in answers {
        read_fails(Replies::Structured, answer);
    }
}

/// An error chunk of an unknown type, with a text, is reported as an error.
#[test]
fn errors_of_the_future_are_errors() {
    let (disk, _dir) = disk_of(Replies::Structured, |a| {
        let text = [&[0, 0, 0, 28, 0, 4][..], b"full", &[9; 40]].concat();
        chunk(1, 0x8077, a.cookie, &text)
    });
    let mut guest = guest(&disk, EngineKind::IoUring);
    assert_eq!(guest.read(0, 4096), Err(libc::ENOSPC));
    assert_eq!(guest.read(0, 4096), Err(libc::ENOSPC));
    guest.detach();
}

#[test]
fn what_nobody_asked_for_ends_the_connection() {
    let (disk, _dir) = disk_of(Replies::Structured, |a| {
        let reply = chunk(1, 0, a.cookie, &[]);
        [reply.clone(), reply].concat()
    });
    let mut guest = guest(&disk, EngineKind::IoUring);
    // Each write uses a connection of its own, at the latest once the second reply has arrived.
    for _ in 0..4 {
        let errno = guest.write(0, &[1; 512]);
        assert!(errno == 0 || errno == libc::EIO, "{errno}");
    }
    assert_eq!(guest.flush(), libc::EIO);
    guest.detach();
}

#[test]
fn lies_about_holes_stay_within_the_answer() {
    let extent = |len: u32, flags: u32| [len.to_be_bytes(), flags.to_be_bytes()].concat();
    let ask = || {
        let mut ask = Ask::read(0, 4096);
        (ask.op, ask.len) = (Op::BlockStatus, SIZE);
        let (start, _) = ask.segments[0];
        ask.segments = vec![(start + 1024, 32)];
        (start, ask)
    };
    // More extents than the request has room for, and beyond the end of the disk.
    let many = move |a: &RequestHeader| {
        let extents = (0..1000).flat_map(|n| extent(u32::MAX - n, n & 1));
        let body: Vec<u8> = 7u32.to_be_bytes().into_iter().chain(extents).collect();
        chunk(1, 5, a.cookie, &body)
    };
    let (disk, _dir) = disk_of(Replies::Structured, many);
    let mut client = guest(&disk, EngineKind::IoUring);
    let (start, question) = ask();
    let (errno, answer) = client.run(question);
    assert_eq!(errno, 0);
    let told: Vec<_> = fathom_core::extents::extents(&answer.data()).collect();
    assert_eq!(told.iter().map(|(_, len)| len).sum::<u64>(), SIZE);
    let memory = &answer.memory.bytes()[start..start + 4096];
    assert!(memory[1056..].iter().all(|byte| *byte == 0xa5));
    client.detach();
    for body in [
        [&9u32.to_be_bytes()[..], &extent(512, 0)].concat(),
        [&7u32.to_be_bytes()[..], &extent(0, 0)].concat(),
        [&7u32.to_be_bytes()[..], &extent(512, 0), &[0; 4]].concat(),
        7u32.to_be_bytes().to_vec(),
    ] {
        let (disk, _dir) = disk_of(Replies::Structured, move |a| chunk(1, 5, a.cookie, &body));
        let mut client = guest(&disk, EngineKind::IoUring);
        assert_eq!(client.run(ask().1).0, libc::EIO);
        client.detach();
    }
}

/// Makes a disk on a server with one connection, which `serve` controls after the handshake.
fn disk_by(
    flags: u16,
    options: NbdOptions,
    serve: impl FnOnce(UnixStream) + Send + 'static,
) -> (Arc<NbdDisk>, TempDir) {
    let dir = short_dir();
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).expect("bound");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        shake(&mut stream, Replies::Simple, flags).expect("a handshake");
        serve(stream);
    });
    let disk = NbdDisk::connect(&uri(&socket), options).expect("connected");
    (Arc::new(disk), dir)
}

/// The guest may reuse its memory after the reply, so a write completes only when all of its data
/// has been sent, even if the server replies earlier.
#[test]
fn an_early_answer_waits_for_the_data_to_be_sent() {
    const LEN: usize = SIZE as usize;
    for kind in EngineKind::ALL {
        let (seen, told) = std::sync::mpsc::channel();
        let serve = move |mut stream: UnixStream| {
            let asked = header(&mut stream, Replies::Simple).expect("a write");
            stream
                .write_all(&simple(28, asked.cookie, &[]))
                .expect("sent");
            std::thread::sleep(Duration::from_millis(200));
            let mut data = vec![0; LEN];
            stream.read_exact(&mut data).expect("data");
            seen.send(data.iter().all(|byte| *byte == 7)).expect("told");
        };
        let (disk, _dir) = disk_by(ALL_FLAGS, NbdOptions::default(), serve);
        let mut client = guest(&disk, kind);
        let (errno, mut ask) = client.run(Ask::write(0, &vec![7; LEN]));
        ask.memory.bytes_mut().fill(9);
        assert_eq!(errno, libc::ENOSPC);
        assert!(told.recv().expect("told"), "{kind}: sent after the answer");
        client.detach();
    }
}

/// The commands and flags that the server receives.
#[test]
fn what_must_be_durable_is_made_so() {
    let through = NbdOptions {
        writethrough: true,
        ..NbdOptions::default()
    };
    let plain = NbdOptions::default();
    let (write, flush, trim, zero) = (1, 3, 4, 6);
    for (flags, options, fua, expected) in [
        (
            ALL_FLAGS,
            &plain,
            false,
            &[(write, 0), (trim, 0), (zero, 2), (zero, 0)][..],
        ),
        (
            ALL_FLAGS,
            &plain,
            true,
            &[(write, 1), (trim, 1), (zero, 3), (zero, 1)],
        ),
        (
            ALL_FLAGS,
            &through,
            false,
            &[(write, 1), (trim, 1), (zero, 3), (zero, 1)],
        ),
        (
            ALL_FLAGS & !FUA,
            &plain,
            true,
            &[
                (write, 0),
                (flush, 0),
                (trim, 0),
                (flush, 0),
                (zero, 2),
                (flush, 0),
                (zero, 0),
                (flush, 0),
            ],
        ),
    ] {
        let (seen, told) = std::sync::mpsc::channel();
        let serve = move |mut stream: UnixStream| {
            while let Some(asked) = next(&mut stream, Replies::Simple) {
                seen.send((asked.command, asked.flags)).expect("told");
                let sent = stream.write_all(&simple(0, asked.cookie, &[]));
                sent.expect("sent");
            }
        };
        let (disk, _dir) = disk_by(flags, options.clone(), serve);
        let mut client = guest(&disk, EngineKind::IoUring);
        let zeroes = |unmap| Ask {
            unmap,
            ..Ask::new(Op::WriteZeroes, 0, 8192)
        };
        for ask in [
            Ask::write(0, &[1; 512]),
            Ask::new(Op::Discard, 4096, 4096),
            zeroes(false),
            zeroes(true),
        ] {
            assert_eq!(client.run(Ask { fua, ..ask }).0, 0);
        }
        client.detach();
        drop(disk);
        // The worker has ended and has sent NBD_CMD_DISC.
        let told: Vec<_> = told.iter().filter(|(command, _)| *command != 2).collect();
        assert_eq!(told, expected);
    }
}
