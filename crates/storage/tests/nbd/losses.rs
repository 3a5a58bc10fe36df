//! Servers that go away, come back, or say nothing.

use crate::common::{Ask, Guest};
use crate::server::{Server, guest};
use fathom_core::Op;
use fathom_storage::{EngineKind, NbdOptions};
use std::time::{Duration, Instant};

const MEMORY: [&str; 2] = ["memory", "2M"];

/// A request that connects again: the loss may be noticed by it only.
fn reads_again(guest: &mut Guest) {
    let started = Instant::now();
    while guest.read(0, 512) != Ok(vec![0; 512]) {
        assert!(started.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn requests_in_flight_fail_with_the_server_and_later_ones_find_the_next() {
    for kind in EngineKind::ALL {
        let mut server = Server::nbdkit(&["--filter=delay", "memory", "2M", "rdelay=60"]);
        let disk = server.disk(NbdOptions::default());
        let mut guest = guest(&disk, kind);
        let asked: Vec<_> = (0..20u64)
            .map(|n| guest.queue(Ask::read(n * 4096, 4096)))
            .collect();
        guest.kick();
        std::thread::sleep(Duration::from_millis(50));
        server.kill();
        for asked in asked {
            assert_eq!(guest.wait(asked).0, libc::EIO);
        }
        // Nobody is there.
        assert_eq!(guest.read(0, 512), Err(libc::EIO));
        server.restart(&MEMORY);
        reads_again(&mut guest);
        assert_eq!(guest.flush(), 0, "nothing was written");
        guest.detach();
    }
}

#[test]
fn flushes_fail_once_written_data_may_be_lost() {
    for flushed in [true, false] {
        let mut server = Server::nbdkit(&MEMORY);
        let disk = server.disk(NbdOptions::default());
        let mut writer = guest(&disk, EngineKind::IoUring);
        let mut other = guest(&disk, EngineKind::Threads);
        assert_eq!(writer.write(4096, &[1; 4096]), 0);
        if flushed {
            // Of one connection, and for all.
            assert_eq!(other.flush(), 0);
        }
        server.kill();
        server.restart(&MEMORY);
        reads_again(&mut other);
        reads_again(&mut writer);
        let expected = if flushed { 0 } else { libc::EIO };
        for guest in [&mut writer, &mut other] {
            assert_eq!(guest.flush(), expected);
            assert_eq!(guest.flush(), expected);
        }
        // Such a write needs no flush.
        let mut durable = Ask::write(0, &[2; 512]);
        durable.fua = true;
        assert_eq!(writer.run(durable).0, 0);
        writer.detach();
        other.detach();
    }
}

#[test]
fn another_export_in_its_place_is_not_taken_for_it() {
    let mut server = Server::nbdkit(&MEMORY);
    let disk = server.disk(NbdOptions::default());
    let mut guest = guest(&disk, EngineKind::IoUring);
    assert_eq!(guest.read(0, 512), Ok(vec![0; 512]));
    server.kill();
    server.restart(&["memory", "1M"]);
    for _ in 0..5 {
        assert_eq!(guest.read(0, 512), Err(libc::EIO));
        std::thread::sleep(Duration::from_millis(30));
    }
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
    // As long as a server that does not hang may need on a busy machine.
    let patience = Duration::from_secs(3);
    let disk = server.disk(NbdOptions {
        timeout: Some(patience),
        connect_timeout: patience,
        ..NbdOptions::default()
    });
    let mut guest = guest(&disk, kind);
    assert_eq!(guest.read(0, 512), Ok(vec![0; 512]));
    server.signal("STOP");
    // More than the socket takes: sends hang, too.
    let mut asked: Vec<_> = (0..8u64)
        .map(|_| guest.queue(Ask::write(0, &vec![7; 1 << 20])))
        .collect();
    asked.push(guest.queue(Ask::read(0, 4096)));
    asked.push(guest.queue(Ask::new(Op::Flush, 0, 0)));
    guest.kick();
    for asked in asked {
        assert_eq!(guest.wait(asked).0, libc::EIO);
    }
    server.signal("CONT");
    let started = Instant::now();
    while guest.read(1 << 20, 512) != Ok(vec![0; 512]) {
        assert!(started.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(100));
    }
    guest.detach();
}

/// It takes long, but not too long.
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
