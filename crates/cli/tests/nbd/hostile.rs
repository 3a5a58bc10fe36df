//! Tests hostile clients. Another client works meanwhile and must not notice them.

use super::support::nbd::Nbd;
use super::support::{PATIENCE, eventually};
use fathom_testing::SetAtEnd;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const MIB: u64 = 1 << 20;

/// A minimal client that can send anything.
struct Raw(UnixStream);

impl Raw {
    fn connect(socket: &PathBuf) -> Raw {
        let stream = UnixStream::connect(socket).expect("somebody listens");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
            .set_write_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        Raw(stream)
    }

    /// Connects, up to the first option of the handshake.
    fn greeted(socket: &PathBuf) -> Raw {
        let mut raw = Raw::connect(socket);
        let mut greeting = [0; 18];
        raw.0.read_exact(&mut greeting).expect("greeted");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        raw.send(&3u32.to_be_bytes());
        raw
    }

    /// Connects and enters the transmission phase, with simple replies.
    fn admitted(socket: &PathBuf) -> Raw {
        let mut raw = Raw::greeted(socket);
        raw.option(1, 0, &[]);
        let mut answer = [0; 10];
        raw.0.read_exact(&mut answer).expect("admitted");
        raw
    }

    fn option(&mut self, option: u32, len: u32, data: &[u8]) {
        let head = [
            b"IHAVEOPT".as_slice(),
            &option.to_be_bytes(),
            &len.to_be_bytes(),
        ];
        self.send(&head.concat());
        self.send(data);
    }

    fn request(&mut self, command: u16, cookie: u64, offset: u64, len: u32) -> bool {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(0u16.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        self.send(&bytes)
    }

    /// Returns false if the server accepts no more data or has closed the connection.
    fn send(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).is_ok()
    }

    /// Waits until the server closes the connection. Ignores all data that the server sends before.
    fn is_dropped(&mut self) {
        let mut buffer = vec![0; 1 << 16];
        loop {
            match self.0.read(&mut buffer) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return,
                Err(e) => panic!("the server keeps the connection: {e}"),
            }
        }
    }

    /// Writes, and reads what it wrote, until `over` is set.
    fn work(&mut self, over: &AtomicBool) {
        let mut reply = vec![0; 16 + 4096];
        let mut number = 0u64;
        while !over.load(Ordering::Relaxed) {
            number += 1;
            let offset = number % 4096 * 4096;
            let data = number.to_be_bytes().repeat(512);
            assert!(self.request(1, 1, offset, 4096) && self.send(&data));
            self.0.read_exact(&mut reply[..16]).expect("written");
            assert!(self.request(0, 2, offset, 4096));
            self.0.read_exact(&mut reply).expect("read");
            assert_eq!(reply[16..], data);
        }
    }
}

/// Runs `harm` with `connections` connections to a server on which another client works all the
/// time.
///
/// Afterwards only a line of log is left of each connection, and the server's memory has never
/// exceeded `limit`.
fn undisturbed(limit: u64, connections: usize, harm: impl FnOnce(&PathBuf)) -> Nbd {
    let mut nbd = Nbd::start("memory:16M", &["--iothreads", "2"]);
    nbd.verify(100, &["--rw", "randrw"]);
    let socket = nbd.path("s");
    let files = || {
        std::fs::read_dir(format!("/proc/{}/fd", nbd.child.id()))
            .unwrap()
            .count()
    };
    let before = files();
    let over = AtomicBool::new(false);
    let mut other = Raw::admitted(&socket);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| other.work(&over));
        let end = SetAtEnd(&over);
        harm(&socket);
        drop(end);
        worker.join().expect("the other client's work");
    });
    drop(other);
    eventually("nothing is left of the clients", || {
        (files() <= before).then_some(())
    });
    nbd.verify(100, &["--rw", "randrw", "--queues", "2"]);
    assert!(nbd.peak_memory() < limit, "{} bytes", nbd.peak_memory());
    assert_eq!(nbd.terminate().0, Some(0), "{}", nbd.log());
    let about = lines(&nbd, "");
    assert!(
        (2..=connections + 1).contains(&about),
        "{about}: {}",
        nbd.log()
    );
    nbd
}

/// Returns the number of log lines with these words about connections of this process.
///
/// Lines that are only counted in a summary are included.
fn lines(nbd: &Nbd, words: &str) -> usize {
    let us = format!("process {}:", std::process::id());
    let wanted = |line: &&str| line.contains(&us) && line.contains(words);
    let more = |line: &str| -> Option<usize> {
        let (_, more) = line.split_once("(and ")?;
        more.split_once(" more like this")?.0.parse().ok()
    };
    let log = nbd.log();
    let lines = log.lines().filter(wanted);
    lines.map(|line| 1 + more(line).unwrap_or(0)).sum()
}

#[test]
fn clients_that_hang_in_the_handshake() {
    undisturbed(100 * MIB, 80, |socket| {
        let silent: Vec<Raw> = (0..40).map(|_| Raw::connect(socket)).collect();
        let mut half: Vec<Raw> = (0..20).map(|_| Raw::greeted(socket)).collect();
        for raw in &mut half {
            raw.send(b"IHAVEOPT\0\0");
        }
        let mut promised: Vec<Raw> = (0..20).map(|_| Raw::greeted(socket)).collect();
        for raw in &mut promised {
            raw.option(7, 100, b"less than promised");
        }
        // The timeout ends these connections.
        for mut raw in silent.into_iter().chain(half).chain(promised) {
            raw.is_dropped();
        }
    });
}

#[test]
fn clients_that_send_garbage() {
    let garbage: Vec<u8> = (0..1u32 << 16)
        .map(|n| (n.wrapping_mul(0x9e37_79b9) >> 13) as u8)
        .collect();
    let nbd = undisturbed(100 * MIB, 30, |socket| {
        for i in 0..10 {
            let mut raw = Raw::connect(socket);
            raw.send(&garbage[i * 7..]);
            raw.is_dropped();
            let mut raw = Raw::greeted(socket);
            raw.send(&garbage[i * 7..]);
            raw.is_dropped();
            let mut raw = Raw::admitted(socket);
            raw.send(&garbage[i * 7..]);
            raw.is_dropped();
        }
    });
    assert_eq!(lines(&nbd, ""), 31, "{}", nbd.log());
}

#[test]
fn clients_that_announce_more_than_they_may() {
    undisturbed(150 * MIB, 7, |socket| {
        for option in [1, 3, 6, 7, 10, 99] {
            let mut raw = Raw::greeted(socket);
            raw.option(option, u32::MAX, &[]);
            while raw.send(&[0; 1 << 16]) {}
            raw.is_dropped();
        }
        // A write of 4 GiB.
        let mut raw = Raw::admitted(socket);
        raw.request(1, 1, 0, u32::MAX - 511);
        while raw.send(&[0; 1 << 16]) {}
        raw.is_dropped();
    });
}

#[test]
fn clients_that_vanish_with_requests_in_flight() {
    let nbd = undisturbed(300 * MIB, 30, |socket| {
        for i in 0..30 {
            let mut raw = Raw::admitted(socket);
            for cookie in 0..40 {
                raw.request(0, cookie, 0, MIB as u32);
            }
            if i % 3 == 0 {
                // The client disconnects in the middle of a write's data, or of a header.
                raw.request(1, 99, 0, 8192);
                raw.send(&[7; 5000]);
            } else if i % 3 == 1 {
                raw.send(&REQUEST_MAGIC.to_be_bytes());
            }
            drop(raw);
        }
    });
    // A client may also disconnect when none of its requests has been read, or all have been
    // completed.
    let (closed, in_flight) = (
        lines(&nbd, "closed by the client"),
        lines(&nbd, "requests in flight"),
    );
    assert!(closed >= 30 && in_flight >= 20, "{}", nbd.log());
}

#[test]
fn clients_that_never_read() {
    let nbd = undisturbed(5 * 64 * MIB + 150 * MIB, 5, |socket| {
        let mut deaf: Vec<Raw> = (0..5).map(|_| Raw::admitted(socket)).collect();
        for raw in &mut deaf {
            let mut cookie = 0;
            while raw.request(0, cookie, 0, MIB as u32) && cookie < 100_000 {
                cookie += 1;
            }
            assert!(cookie < 100_000, "the server takes requests without end");
        }
        std::thread::sleep(Duration::from_secs(1));
    });
    assert!(lines(&nbd, "requests in flight") <= 5, "{}", nbd.log());
}

#[test]
fn thousands_of_clients() {
    undisturbed(300 * MIB, 2005, |socket| {
        for round in 0..5 {
            let many: Vec<Raw> = (0..400).map(|_| Raw::connect(socket)).collect();
            if round % 2 == 0 {
                continue;
            }
            // The server makes room by disconnecting idle clients.
            let mut last = Raw::admitted(socket);
            assert!(last.request(0, 1, 0, 512));
            let mut reply = [0; 16 + 512];
            last.0.read_exact(&mut reply).expect("served");
            drop(many);
        }
    });
}
