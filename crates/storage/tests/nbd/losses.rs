//! Tests servers that end, return, or hang.

use crate::common::model::{Model, plans};
use crate::common::{Ask, Guest};
use crate::server::{Server, guest, short_dir};
use fathom_core::{Disk, Op};
use fathom_storage::{EngineKind, NbdDisk, NbdOptions};
use fathom_testing::{SetAtEnd, until};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const MEMORY: [&str; 2] = ["memory", "2M"];
const SECTORS: u64 = 4096;

fn waiting(reconnect: Duration) -> NbdOptions {
    NbdOptions {
        reconnect: Some(reconnect),
        ..NbdOptions::default()
    }
}

/// Waits until a disk whose requests fail without a server can read again.
fn reads_again(guest: &mut Guest) {
    until("a read", || guest.read(0, 512) == Ok(vec![0; 512]));
}

/// A server is killed and restarted repeatedly, with its image, under all kinds of requests by two
/// workers. No request fails, and all data is in place.
#[test]
fn a_server_may_die_as_often_as_it_likes() {
    let dir = short_dir();
    let image = dir.path().join("image");
    std::fs::File::create(&image)
        .and_then(|file| file.set_len(SECTORS * 512))
        .expect("an image");
    let args = ["file", image.to_str().expect("text")];
    for (kind, connections) in [
        (EngineKind::IoUring, 3),
        (EngineKind::Native, 1),
        (EngineKind::Threads, 2),
    ] {
        let mut server = Server::nbdkit(&args);
        let disk = server.disk(NbdOptions {
            connections,
            ..NbdOptions::default()
        });
        let (is_over, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let load = scope.spawn(|| write_and_read(&disk, kind, &is_over, &rounds));
            let _end = SetAtEnd(&is_over);
            for n in 0..8 {
                let before = rounds.load(Ordering::Relaxed);
                until("a round of requests", || {
                    load.is_finished() || rounds.load(Ordering::Relaxed) > before
                });
                // At a random moment of the next round.
                std::thread::sleep(Duration::from_millis(20 * n));
                server.kill();
                server.restart(&args);
            }
        });
    }
}

/// Runs rounds of requests until `is_over` is set, and counts them.
fn write_and_read(
    disk: &Arc<NbdDisk>,
    kind: EngineKind,
    is_over: &AtomicBool,
    rounds: &AtomicUsize,
) {
    let mut guests = [guest(disk, kind), guest(disk, kind)];
    let mut model = Model::new(SECTORS);
    let mut zeroes = Ask::new(Op::WriteZeroes, 0, SECTORS * 512);
    zeroes.unmap = false;
    assert_eq!(guests[0].run(zeroes).0, 0);
    let mut runner = TestRunner::deterministic();
    let batch = prop::collection::vec(plans(SECTORS, 2), 100);
    while !is_over.load(Ordering::Relaxed) {
        let batch = batch.new_tree(&mut runner).expect("plans").current();
        model.run(&mut guests, &batch);
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    let all = guests[0].read(0, SECTORS * 512).expect("read");
    model.check(0, &all);
    guests.into_iter().for_each(Guest::detach);
}

/// A server that loses unflushed writes, because it stores them in memory.
#[test]
fn what_was_not_flushed_is_written_again() {
    for kind in EngineKind::ALL {
        let mut server = Server::nbdkit(&MEMORY);
        let disk = server.disk(NbdOptions::default());
        let (mut one, mut other) = (guest(&disk, kind), guest(&disk, kind));
        assert_eq!(one.write(0, &[1; 4096]), 0);
        assert_eq!(other.flush(), 0);
        // The workers take turns, and each overwrites a part of the other's data.
        for n in 0..100u64 {
            let writer = if n.is_multiple_of(2) {
                &mut one
            } else {
                &mut other
            };
            assert_eq!(writer.write(8192 + n * 512, &[n as u8; 1536]), 0);
        }
        let mut zeroes = Ask::new(Op::WriteZeroes, 8192, 512);
        zeroes.unmap = true;
        assert_eq!(one.run(zeroes).0, 0);
        // A durable write must not be overwritten by an older one that is sent again.
        assert_eq!(one.write(1 << 20, &[6; 4096]), 0);
        let mut durable = Ask::write(1 << 20, &[7; 4096]);
        durable.fua = true;
        assert_eq!(other.run(durable).0, 0);
        let mut expected = one.read(8192, 102 * 512).expect("read");
        assert_eq!((expected[0], expected[512], expected[513 * 99]), (0, 1, 99));
        // Writes from before the flush are not kept, so the server, whose memory is new, has zeroes
        // there.
        let mut last = 7;
        for _ in 0..2 {
            server.kill();
            server.restart(&MEMORY);
            assert_eq!(other.read(8192, 102 * 512).expect("read"), expected);
            assert_eq!(one.read(0, 4096).expect("read"), [0; 4096]);
            assert_eq!(one.read(1 << 20, 4096).expect("read"), [last; 4096]);
            // The reconnection has flushed the writes, so they are not kept any more.
            expected.fill(0);
            last = 0;
        }
        assert_eq!(one.flush(), 0);
        one.detach();
        other.detach();
    }
}

/// Unflushed writes of a channel that has ended are sent again, too.
#[test]
fn what_a_worker_that_has_gone_wrote_is_written_again() {
    let mut server = Server::nbdkit(&MEMORY);
    let disk = server.disk(NbdOptions::default());
    let mut one = guest(&disk, EngineKind::IoUring);
    assert_eq!(one.write(4096, &[5; 4096]), 0);
    one.detach();
    let mut other = guest(&disk, EngineKind::IoUring);
    assert_eq!(other.read(4096, 4096).expect("read"), [5; 4096]);
    server.kill();
    server.restart(&MEMORY);
    assert_eq!(other.read(4096, 4096).expect("read"), [5; 4096]);
    // Deactivation flushes, so the disk's next user need not know of unflushed writes.
    assert_eq!(other.write(8192, &[6; 4096]), 0);
    disk.deactivate().expect("flushed");
    server.kill();
    assert!(disk.deactivate().is_ok(), "there is nothing left to flush");
    server.restart(&MEMORY);
    assert_eq!(other.read(8192, 4096).expect("read"), [0; 4096]);
    other.detach();
}

/// A disk that was deactivated sends no writes again, however late its server returns, because
/// others may have written there.
#[test]
fn what_is_not_in_use_is_not_written_again() {
    let mut server = Server::nbdkit(&MEMORY);
    let options = NbdOptions {
        connect_timeout: Duration::from_secs(1),
        ..NbdOptions::default()
    };
    let disk = server.disk(options);
    let mut guest = guest(&disk, EngineKind::IoUring);
    assert_eq!(guest.write(0, &[1; 4096]), 0);
    server.kill();
    let problem = disk
        .deactivate()
        .expect_err("the server is away")
        .to_string();
    assert!(problem.contains("are lost"), "{problem}");
    server.restart(&MEMORY);
    reads_again(&mut guest);
    assert_eq!(guest.write(4096, &[2; 4096]), 0);
    guest.detach();
    drop(disk);
    // A server that accepts one connection is flushed on that connection.
    let one = [
        "--filter=multi-conn",
        "memory",
        "2M",
        "multi-conn-mode=disable",
    ];
    let mut server = Server::nbdkit(&one);
    let disk = server.disk(NbdOptions::default());
    let mut guest = crate::server::guest(&disk, EngineKind::IoUring);
    assert_eq!(guest.write(0, &[1; 4096]), 0);
    disk.deactivate().expect("flushed");
    server.kill();
    server.restart(&one);
    assert_eq!(guest.read(0, 4096).expect("read"), [0; 4096]);
    guest.detach();
}

/// A server that shuts down in an orderly way replies NBD_ESHUTDOWN to every request.
#[test]
fn a_server_may_be_ended_in_an_orderly_way() {
    let args = ["--filter=delay", "memory", "2M", "rdelay=20ms"];
    let mut server = Server::nbdkit(&args);
    let disk = server.disk(NbdOptions::default());
    let mut guest = guest(&disk, EngineKind::IoUring);
    for _ in 0..5 {
        let asked: Vec<_> = (0..30)
            .map(|n| guest.queue(Ask::read(n * 4096, 4096)))
            .collect();
        guest.kick();
        server.signal("TERM");
        std::thread::sleep(Duration::from_millis(30));
        server.kill();
        server.restart(&args);
        for asked in asked {
            assert_eq!(guest.wait(asked).0, 0);
        }
    }
    guest.detach();
}

#[test]
fn requests_fail_when_they_have_waited_long_enough() {
    for kind in EngineKind::ALL {
        let mut server = Server::nbdkit(&["--filter=delay", "memory", "2M", "rdelay=60"]);
        let patience = Duration::from_millis(400);
        let disk = server.disk(waiting(patience));
        let mut guest = guest(&disk, kind);
        let asked: Vec<_> = (0..20u64)
            .map(|n| guest.queue(Ask::read(n * 4096, 4096)))
            .collect();
        guest.kick();
        std::thread::sleep(Duration::from_millis(50));
        let started = Instant::now();
        server.kill();
        for asked in asked {
            assert_eq!(guest.wait(asked).0, libc::EIO);
        }
        assert!(started.elapsed() >= patience);
        assert_eq!(guest.read(0, 512), Err(libc::EIO));
        server.restart(&MEMORY);
        reads_again(&mut guest);
        assert_eq!(guest.flush(), 0);
        guest.detach();
    }
}

#[test]
fn without_patience_requests_fail_at_once() {
    let mut server = Server::nbdkit(&MEMORY);
    let disk = server.disk(waiting(Duration::ZERO));
    let mut guest = guest(&disk, EngineKind::IoUring);
    assert_eq!(guest.write(0, &[0; 4096]), 0);
    server.kill();
    until("a read that fails", || guest.read(0, 512).is_err());
    let started = Instant::now();
    for _ in 0..1000 {
        assert_eq!(guest.write(0, &[1; 512]), libc::EIO);
    }
    assert!(started.elapsed() < Duration::from_secs(60));
    server.restart(&MEMORY);
    reads_again(&mut guest);
    guest.detach();
}

#[test]
fn another_export_in_its_place_is_not_taken_for_it() {
    let mut server = Server::nbdkit(&MEMORY);
    let disk = server.disk(waiting(Duration::from_millis(300)));
    let mut guest = guest(&disk, EngineKind::IoUring);
    assert_eq!(guest.read(0, 512), Ok(vec![0; 512]));
    server.kill();
    server.restart(&["memory", "1M"]);
    for _ in 0..3 {
        assert_eq!(guest.read(0, 512), Err(libc::EIO));
    }
    server.kill();
    server.restart(&MEMORY);
    reads_again(&mut guest);
    guest.detach();
}

#[test]
fn a_server_that_hangs_is_given_up() {
    std::thread::scope(|scope| {
        for kind in EngineKind::ALL {
            scope.spawn(move || gives_up(kind));
        }
    });
}

fn gives_up(kind: EngineKind) {
    let server = Server::nbdkit(&MEMORY);
    // Longer than a working server needs on a busy machine.
    let patience = Duration::from_secs(3);
    let disk = server.disk(NbdOptions {
        timeout: Some(patience),
        connect_timeout: patience,
        reconnect: Some(Duration::ZERO),
        ..NbdOptions::default()
    });
    let mut guest = guest(&disk, kind);
    assert_eq!(guest.read(0, 512), Ok(vec![0; 512]));
    server.stop();
    // More than the socket buffer holds, so that sends block, too.
    let mut asked: Vec<_> = (0..8u64)
        .map(|_| guest.queue(Ask::write(0, &vec![7; 1 << 20])))
        .collect();
    asked.push(guest.queue(Ask::read(0, 4096)));
    asked.push(guest.queue(Ask::new(Op::Flush, 0, 0)));
    guest.kick();
    for asked in asked {
        assert_eq!(guest.wait(asked).0, libc::EIO);
    }
    server.go_on();
    until("a read", || guest.read(1 << 20, 512) == Ok(vec![0; 512]));
    guest.detach();
}

/// The server takes long, but less than the timeout.
#[test]
fn a_slow_server_is_not_given_up() {
    let server = Server::nbdkit(&["--filter=delay", "memory", "2M", "rdelay=700ms"]);
    let disk = server.disk(NbdOptions {
        timeout: Some(Duration::from_secs(60)),
        ..NbdOptions::default()
    });
    let mut guest = guest(&disk, EngineKind::IoUring);
    assert_eq!(guest.read(0, 512), Ok(vec![0; 512]));
    guest.detach();
}
