//! Tests servers that conform to the protocol.

use crate::common::model::{Model, plans};
use crate::common::{Ask, Guest};
use crate::server::{Server, guest, read_only, refused, uri};
use fathom_core::extents::extents;
use fathom_core::{Disk, Op, Status};
use fathom_nbd::NbdUri;
use fathom_nbd::protocol::Replies;
use fathom_storage::{EngineKind, NbdDisk, NbdOptions, engine};
use fathom_testing::Deadline;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: &str = "2M";
const SECTORS: u64 = 4096;

/// Runs random requests by `workers` workers, up to 64 at a time, checked against a model.
pub fn exercise(uri: &NbdUri, options: &NbdOptions, workers: usize, rounds: usize) {
    let mut runner = TestRunner::deterministic();
    for kind in EngineKind::ALL {
        let disk = NbdDisk::connect(uri, options.clone()).expect("connected");
        let disk = Arc::new(disk);
        let mut guests: Vec<_> = (0..workers).map(|_| guest(&disk, kind)).collect();
        let mut model = Model::new(SECTORS);
        // Clears the data of the previous engine's run.
        let mut zeroes = Ask::new(Op::WriteZeroes, 0, SECTORS * 512);
        zeroes.unmap = false;
        if disk.info().write_zeroes.is_some() {
            assert_eq!(guests[0].run(zeroes).0, 0);
        } else {
            assert_eq!(guests[0].write(0, &vec![0; SECTORS as usize * 512]), 0);
        }
        let batch = prop::collection::vec(plans(SECTORS, workers), 200 * rounds);
        let mut batch = batch.new_tree(&mut runner).expect("plans").current();
        let info = disk.info();
        batch.retain(|plan| match plan.op {
            Op::Discard => info.discard.is_some(),
            Op::WriteZeroes => info.write_zeroes.is_some(),
            _ => true,
        });
        model.run(&mut guests, &batch);
        guests.into_iter().for_each(Guest::detach);
    }
}

#[test]
fn nbdkit_keeps_what_is_written() {
    let plain = NbdOptions::default();
    exercise(&Server::nbdkit(&["memory", SIZE]).uri(), &plain, 2, 3);
    exercise(
        &Server::nbdkit(&["--no-sr", "memory", SIZE]).uri(),
        &plain,
        2,
        3,
    );
    let several = NbdOptions {
        connections: 4,
        ..plain
    };
    exercise(&Server::nbdkit(&["memory", SIZE]).uri(), &several, 2, 3);
}

/// Without FUA, a write that must be durable is followed by a flush.
#[test]
fn what_a_server_cannot_do_is_done_otherwise() {
    let writethrough = NbdOptions {
        writethrough: true,
        ..NbdOptions::default()
    };
    for args in [
        // The filter's default mode is no FUA.
        &["--filter=fua", "memory", SIZE][..],
        &["--filter=fua", "memory", SIZE, "fuamode=native"],
        &["--filter=nozero", "memory", SIZE, "zeromode=none"],
    ] {
        exercise(&Server::nbdkit(args).uri(), &writethrough, 1, 1);
    }
}

#[test]
fn qemus_server_keeps_what_is_written() {
    let plain = NbdOptions::default();
    exercise(
        &Server::qemu_nbd("qcow2", SIZE, &["--shared=4"]).uri(),
        &plain,
        2,
        2,
    );
    let server = Server::qemu_nbd("raw", SIZE, &[]);
    assert_eq!(
        server.disk(plain.clone()).export().replies,
        Replies::Extended
    );
    exercise(&server.uri(), &plain, 1, 2);
}

/// A server that rejects requests that violate its block size constraints.
#[test]
fn requests_are_cut_to_what_the_server_takes() {
    let policy = [
        "--filter=blocksize-policy",
        "memory",
        SIZE,
        "blocksize-minimum=512",
        "blocksize-preferred=4096",
        "blocksize-maximum=16384",
        "blocksize-error-policy=error",
    ];
    let server = Server::nbdkit(&policy);
    exercise(&server.uri(), &NbdOptions::default(), 2, 1);
    let coarse = [
        "--filter=blocksize-policy",
        "memory",
        SIZE,
        "blocksize-minimum=4096",
        "blocksize-preferred=65536",
        "blocksize-maximum=131072",
        "blocksize-error-policy=error",
    ];
    let server = Server::nbdkit(&coarse);
    let disk = server.disk(NbdOptions::default());
    let info = disk.info();
    assert_eq!((info.block_size, info.physical_block_size), (4096, 65536));
    let mut guest = guest(&disk, EngineKind::IoUring);
    let data: Vec<u8> = (0..1 << 20).map(|n| (n / 7) as u8).collect();
    assert_eq!(guest.write(4096, &data), 0);
    assert_eq!(guest.read(4096, 1 << 20).expect("read"), data);
    assert_eq!(guest.read(512, 512), Err(libc::EINVAL));
    guest.detach();
}

/// More commands than the channel has room for, in large and in small pieces.
#[test]
fn a_slow_server_gets_everything_in_the_end() {
    let server = Server::nbdkit(&["--filter=delay", "memory", "64M", "rdelay=20ms"]);
    for kind in EngineKind::ALL {
        let disk = server.disk(NbdOptions::default());
        let mut guest = guest(&disk, kind);
        let data: Vec<u8> = (0..33 << 20).map(|n: u32| (n >> 9) as u8).collect();
        assert_eq!(guest.write(0, &data), 0);
        let asked: Vec<_> = (0..60u64)
            .map(|n| guest.queue(Ask::read(n * 512, (n % 3 * 300 + 1) << 10)))
            .collect();
        guest.kick();
        for (n, asked) in asked.into_iter().enumerate() {
            let (errno, ask) = guest.wait(asked);
            assert_eq!(errno, 0);
            let read = ask.data();
            assert!(read == data[n * 512..n * 512 + read.len()], "read {n}");
        }
        assert!(guest.read(0, 33 << 20).expect("read") == data);
        guest.detach();
    }
}

#[test]
fn errors_are_the_servers() {
    let errors = ["--filter=error", "memory", SIZE];
    for (error, errno) in [
        ("ENOSPC", libc::ENOSPC),
        ("EIO", libc::EIO),
        ("EPERM", libc::EPERM),
        ("EINVAL", libc::EINVAL),
    ] {
        for more in [&[][..], &["--no-sr"]] {
            let (rate, which) = ("error-pread-rate=100%", format!("error-pread={error}"));
            let server = Server::nbdkit(&[more, &errors, &[rate, &which]].concat());
            let disk = server.disk(NbdOptions::default());
            let mut guest = guest(&disk, EngineKind::IoUring);
            assert_eq!(guest.read(0, 4096), Err(errno));
            assert_eq!(guest.write(0, &[7; 512]), 0);
            assert_eq!(guest.read(0, 512), Err(errno));
            guest.detach();
        }
    }
}

fn status(guest: &mut Guest, offset: u64, len: u64, room: usize) -> Vec<(Status, u64)> {
    let mut ask = Ask::read(0, room as u64);
    (ask.op, ask.offset, ask.len) = (Op::BlockStatus, offset, len);
    let (errno, ask) = guest.run(ask);
    assert_eq!(errno, 0);
    extents(&ask.data()).collect()
}

#[test]
fn holes_are_told_from_data() {
    let server = Server::nbdkit(&["memory", "1M"]);
    let disk = server.disk(NbdOptions::default());
    for kind in EngineKind::ALL {
        let mut guest = guest(&disk.clone(), kind);
        assert_eq!(guest.write(256 << 10, &[1; 128 << 10]), 0);
        let (data, hole) = (Status::DATA, Status::HOLE);
        let all = [(hole, 256 << 10), (data, 128 << 10), (hole, 640 << 10)];
        assert_eq!(status(&mut guest, 0, 1 << 20, 4096), all);
        assert_eq!(status(&mut guest, 0, 1 << 20, 16), all[..2]);
        let some = [(data, 64 << 10), (hole, 512)];
        assert_eq!(status(&mut guest, 320 << 10, (64 << 10) + 512, 4096), some);
        guest.detach();
    }
    let plain = Server::nbdkit(&["--no-sr", "memory", "1M"]);
    let disk = plain.disk(NbdOptions::default());
    let mut guest = guest(&disk, EngineKind::IoUring);
    let told = status(&mut guest, 4096, 8192, 64);
    assert_eq!(told, [(Status::DATA, 8192)]);
    guest.detach();
}

#[test]
fn a_server_for_one_serves_one_worker() {
    let one = [
        "--filter=multi-conn",
        "memory",
        SIZE,
        "multi-conn-mode=disable",
    ];
    let server = Server::nbdkit(&one);
    let several = NbdOptions {
        connections: 2,
        ..NbdOptions::default()
    };
    assert!(refused(&server.uri(), several).contains("--server-connections 1"));
    let disk = server.disk(NbdOptions::default());
    let mut first = guest(&disk, EngineKind::IoUring);
    let second = fathom_core::WorkerHandle::spawn(
        disk.clone(),
        || engine(EngineKind::IoUring),
        fathom_core::WorkerOptions::default(),
    );
    let line = second.err().expect("refused").to_string();
    assert!(line.contains("--iothreads 1"), "{line}");
    assert_eq!(first.write(0, &[1; 512]), 0);
    first.detach();
}

#[test]
fn what_is_read_only_stays_so() {
    let server = Server::nbdkit(&["-r", "memory", SIZE]);
    let line = refused(&server.uri(), NbdOptions::default());
    assert!(line.contains("--readonly"), "{line}");
    let disk = server.disk(read_only());
    assert!(disk.info().read_only && disk.info().discard.is_none());
    let mut guest = guest(&disk, EngineKind::IoUring);
    assert_eq!(guest.write(0, &[1; 512]), libc::EROFS);
    assert_eq!(guest.read(0, 512).expect("read"), [0; 512]);
    guest.detach();
}

#[test]
fn what_is_no_server_is_refused_with_one_clear_line() {
    let dir = crate::server::short_dir();
    let missing = uri(&dir.path().join("missing"));
    assert!(refused(&missing, NbdOptions::default()).contains("no such file"));
    let small = Server::nbdkit(&["memory", "511"]);
    assert!(refused(&small.uri(), NbdOptions::default()).contains("511 bytes"));
    let silent = dir.path().join("silent");
    let listener = std::os::unix::net::UnixListener::bind(&silent).expect("bound");
    let options = NbdOptions {
        connect_timeout: Duration::from_millis(100),
        ..NbdOptions::default()
    };
    let started = Instant::now();
    let line = refused(&uri(&silent), options);
    assert!(line.contains("did not respond in time"), "{line}");
    assert!(started.elapsed() >= Duration::from_millis(100));
    drop(listener);
    let named = Server::qemu_nbd("raw", SIZE, &["--export-name=disk"]);
    assert!(refused(&named.uri(), NbdOptions::default()).contains("no export ''"));
    let text = named.uri().to_string().replace(":///", ":///disk");
    let disk = NbdDisk::connect(&text.parse().expect("a URI"), NbdOptions::default());
    assert_eq!(Arc::new(disk.expect("connected")).info().size, 2 << 20);
}

/// Connects by TCP.
#[test]
fn hosts_are_reached_by_name() {
    let port = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        free.local_addr().expect("bound").port().to_string()
    };
    let mut child = std::process::Command::new("nbdkit")
        .args([
            "--foreground",
            "--exit-with-parent",
            "-i",
            "127.0.0.1",
            "-p",
        ])
        .args([&port, "memory", SIZE])
        .spawn()
        .expect("nbdkit is installed");
    let uri = format!("nbd://localhost:{port}").parse().expect("a URI");
    let deadline = Deadline::new("a connection");
    let disk = loop {
        match NbdDisk::connect(&uri, NbdOptions::default()) {
            Ok(disk) => break Arc::new(disk),
            Err(error) => deadline.check_with(|| error.to_string()),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut guest = guest(&disk, EngineKind::Threads);
    assert_eq!(guest.write(512, &[3; 1024]), 0);
    assert_eq!(guest.read(512, 1024).expect("read"), [3; 1024]);
    guest.detach();
    child.kill().expect("killed");
    child.wait().expect("gone");
}
