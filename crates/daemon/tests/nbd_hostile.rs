//! Clients of NBD's transmission phase that stall, vanish or send anything,
//! and servers that have enough of them.

mod support;

use fathom_core::Disk;
use fathom_core::testing::TestDisk;
use fathom_exports::nbd::connection::{Ending, Limits, Stream};
use fathom_nbd::protocol::{Replies, command};
use fathom_storage::{EngineKind, MemoryDisk};
use fathom_testing::{PATIENCE, until};
use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use support::client::Client;
use support::{Setup, pattern, worker};

fn each(test: impl Fn(EngineKind)) {
    for kind in EngineKind::ALL {
        println!("{kind}");
        test(kind);
    }
}

/// A disk that holds its requests back, and how many it holds.
fn holding() -> (Arc<TestDisk>, Arc<dyn Disk>) {
    let disk = TestDisk::new();
    disk.hold();
    (disk.clone(), disk)
}

fn await_held(disk: &TestDisk, n: usize) {
    until("requests are with the disk", || disk.held.load(SeqCst) == n);
}

fn works(client: &mut Client) {
    let data = pattern(4, 40_960);
    assert_eq!(client.write(4096, &data).error, 0);
    assert_eq!(client.read(4096, data.len()), data);
}

#[test]
fn a_client_that_stops_half_way_holds_nobody_up() {
    each(|kind| {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(64 << 20).expect("a disk"));
        let worker = worker(&disk, kind);
        let (_other, mut other) = Setup::default().serve(&disk, &worker);
        for len in [512, 16384, 70_000 & !511, 1 << 20] {
            let (served, mut slow) = Setup::default().serve(&disk, &worker);
            let data = pattern(8, len);
            let (cookie, mut bytes) = slow.header(command::WRITE, 0, 8 << 20, len as u64);
            bytes.extend(&data);
            let stops = [1, 27, 28, 29, 28 + len / 2, 27 + len];
            let mut sent = 0;
            for stop in stops {
                slow.stream.write_all(&bytes[sent..stop]).expect("sent");
                sent = stop;
                works(&mut other);
            }
            slow.stream.write_all(&bytes[sent..]).expect("sent");
            assert_eq!(slow.reply_to(cookie).error, 0);
            assert!(slow.read(8 << 20, len) == data);
            // And once more, without ever coming to the end.
            let (_, header) = slow.header(command::WRITE, 0, 0, len as u64);
            slow.stream.write_all(&header).expect("sent");
            slow.stream.write_all(&data[..len / 3]).expect("sent");
            works(&mut other);
            drop(slow);
            let unanswered = usize::from(len > 16384);
            assert_eq!(served.end(), Ending::Vanished { unanswered });
        }
    });
}

/// Send until the server takes no more. Returns how many.
fn flood(client: &mut Client, command: u16, len: u64) -> usize {
    client.stream.set_nonblocking(true).expect("set");
    let mut count = 0;
    loop {
        let (_, bytes) = client.header(command, 0, 0, len);
        let mut rest = &bytes[..];
        let mut waited = 0;
        while !rest.is_empty() {
            match client.stream.write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    if rest.len() == bytes.len() && waited > 100 {
                        client.stream.set_nonblocking(false).expect("set");
                        client.forget_last();
                        return count;
                    }
                    waited += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        count += 1;
        assert!(count < 1_000_000, "the server takes anything");
    }
}

#[test]
fn a_client_that_does_not_read_is_not_listened_to() {
    each(|kind| {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(64 << 20).expect("a disk"));
        let worker = worker(&disk, kind);
        let (_other, mut other) = Setup::default().serve(&disk, &worker);
        for (command, len) in [
            (command::READ, 65536),
            (command::READ, 3 << 20),
            (command::FLUSH, 0),
            (99, 512),
        ] {
            let setup = Setup {
                limits: Limits {
                    requests: 64,
                    memory: Limits::MIN_MEMORY,
                },
                ..Setup::with(Replies::Structured)
            };
            let (served, mut deaf) = setup.serve(&disk, &worker);
            let sent = flood(&mut deaf, command, len);
            works(&mut other);
            if command == command::FLUSH {
                // The client is served again as soon as it reads.
                (0..sent).for_each(|_| assert_eq!(deaf.reply().1.error, 0));
                works(&mut deaf);
                let sent = flood(&mut deaf, command, len);
                assert!(sent > 0);
            }
            // Or never: a server that is through with it does not wait.
            let start = Instant::now();
            assert_eq!(served.detach(), Ending::Detached);
            assert!(start.elapsed() < PATIENCE);
            works(&mut other);
        }
    });
}

#[test]
fn a_client_that_reads_late_gets_everything() {
    each(|kind| {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(64 << 20).expect("a disk"));
        let worker = worker(&disk, kind);
        for replies in [Replies::Simple, Replies::Extended] {
            let (served, mut late) = Setup::with(replies).serve(&disk, &worker);
            let data = pattern(6, 200 << 10);
            assert_eq!(late.write(0, &data).error, 0);
            let sent = flood(&mut late, command::READ, data.len() as u64);
            for _ in 0..sent {
                assert!(late.reply().1.bytes(0, data.len()) == data);
            }
            late.disconnect();
            assert_eq!(served.end(), Ending::Disconnected);
        }
    });
}

#[test]
fn replies_come_in_the_order_in_which_requests_end() {
    each(|kind| {
        let (held, disk) = holding();
        held.out_of_order.store(true, SeqCst);
        let worker = worker(&disk, kind);
        let (_served, mut client) = Setup::default().serve(&disk, &worker);
        let cookies: Vec<u64> = (0..32)
            .map(|n| client.send(command::READ, 0, n * 8192, 4096))
            .collect();
        await_held(&held, 32);
        let mut got = Vec::new();
        while got.len() < 32 {
            held.release();
            let (cookie, reply) = client.reply();
            let at = cookies.iter().position(|c| *c == cookie).expect("asked");
            let sector = (at * 16) as u8;
            assert_eq!(
                reply.bytes(at as u64 * 8192, 4096)[..512],
                [sector ^ 0x5a; 512]
            );
            got.push(cookie);
        }
        assert_ne!(got, cookies);
        got.sort();
        assert_eq!(got, cookies);
    });
}

#[test]
fn writes_keep_their_data_until_the_disk_has_taken_it() {
    each(|kind| {
        let (held, disk) = holding();
        let worker = worker(&disk, kind);
        let (_served, mut client) = Setup::default().serve(&disk, &worker);
        // More than one block of the connection's memory.
        let data = pattern(12, 800 << 10);
        let cookies: Vec<u64> = (data.chunks(8192).enumerate())
            .map(|(n, data)| {
                let cookie = client.send_write(0, n as u64 * 8192, data);
                await_held(&held, n + 1);
                cookie
            })
            .collect();
        held.release();
        for _ in &cookies {
            assert_eq!(client.reply().1.error, 0);
        }
        assert!(held.bytes.lock()[..data.len()] == data);
    });
}

#[test]
fn who_vanishes_leaves_nothing_behind() {
    each(|kind| {
        let (held, disk) = holding();
        let worker = worker(&disk, kind);
        let (served, mut client) = Setup::default().serve(&disk, &worker);
        for n in 0..10 {
            client.send(command::READ, 0, n * 4096, 4096);
            client.send_write(0, n * 4096, &[1; 4096]);
        }
        await_held(&held, 20);
        drop(client);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!served.has_ended(), "the disk still has its requests");
        held.release();
        assert_eq!(served.end(), Ending::Vanished { unanswered: 20 });
        // The server has nevertheless executed the commands that the client had sent.
        assert!(held.bytes.lock()[..40960].iter().all(|b| *b == 1));
    });
}

#[test]
fn who_says_goodbye_still_gets_the_answers() {
    each(|kind| {
        let (held, disk) = holding();
        let worker = worker(&disk, kind);
        for goodbye in [true, false] {
            held.hold();
            let (served, mut client) = Setup::default().serve(&disk, &worker);
            let cookies: Vec<u64> = (0..8)
                .map(|n| client.send(command::READ, 0, n * 4096, 4096))
                .collect();
            await_held(&held, 8);
            if goodbye {
                client.disconnect();
            } else {
                client.stream.shutdown(Shutdown::Write).expect("shut down");
            }
            std::thread::sleep(Duration::from_millis(10));
            held.release();
            for _ in &cookies {
                assert_eq!(client.reply().1.error, 0);
            }
            let ending = match goodbye {
                true => Ending::Disconnected,
                false => Ending::Vanished { unanswered: 8 },
            };
            assert_eq!(served.end(), ending);
            client.expect_end();
        }
    });
}

#[test]
fn garbage_ends_a_connection_after_what_came_before_it() {
    each(|kind| {
        let (held, disk) = holding();
        let worker = worker(&disk, kind);
        let (served, mut client) = Setup::default().serve(&disk, &worker);
        client.send(command::READ, 0, 0, 4096);
        client.stream.write_all(&[0x55; 100_000]).expect("sent");
        await_held(&held, 1);
        held.release();
        assert_eq!(client.reply().1.error, 0);
        let ending = served.end();
        assert!(
            matches!(&ending, Ending::Failed(why) if why.contains("0x55555555")),
            "{ending}"
        );
    });
}

#[test]
fn a_detach_waits_for_the_disk_and_sends_the_answers() {
    each(|kind| {
        let (held, disk) = holding();
        let worker = worker(&disk, kind);
        let (served, mut client) = Setup::default().serve(&disk, &worker);
        for n in 0..4 {
            client.send(command::READ, 0, n * 4096, 4096);
        }
        // A write whose payload does not arrive as a whole gets no reply.
        let (_, header) = client.header(command::WRITE, 0, 0, 500 << 10);
        client.stream.write_all(&header).expect("sent");
        client.stream.write_all(&[1; 300 << 10]).expect("sent");
        await_held(&held, 5);
        std::thread::scope(|scope| {
            let detached = scope.spawn(|| served.detach());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!detached.is_finished(), "the disk has its buffers");
            held.release();
            assert_eq!(detached.join().expect("detached"), Ending::Detached);
        });
        (0..4).for_each(|_| assert_eq!(client.reply().1.error, 0));
        client.expect_end();
    });
}

#[test]
fn a_worker_can_go_without_its_connections() {
    each(|kind| {
        let (_, disk) = holding();
        let worker = worker(&disk, kind);
        let (_served, mut client) = Setup::default().serve(&disk, &worker);
        client.stream.write_all(&[0x25]).expect("sent");
        std::thread::sleep(Duration::from_millis(5));
        drop(_served);
        drop(worker);
        client.expect_end();
    });
}

#[test]
fn what_came_with_the_handshake_is_served() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(64 << 20).expect("a disk"));
    let worker = worker(&disk, EngineKind::IoUring);
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let mut client = Client::new(theirs, Replies::Structured);
    let (cookie, mut read_ahead) = client.header(command::WRITE, 0, 0, 4096);
    read_ahead.extend([3; 1000]);
    let stream = Stream {
        socket: ours.into(),
        tls: None,
        read_ahead,
    };
    let _served = Setup::default().attach(stream, &disk, &worker);
    client.stream.write_all(&[3; 3096]).expect("sent");
    assert_eq!(client.reply_to(cookie).error, 0);
    assert_eq!(client.read(0, 4096), [3; 4096]);
}
