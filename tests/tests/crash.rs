//! `kill -9` of the server in the middle of a verified load: QEMU connects to its successor, the
//! requests in flight are served again, the guest notices nothing.

use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_tests::Place;
use fathom_tests::load::Load;

const MIB: u64 = 1 << 20;
const KILLS: usize = 4;

#[test]
fn the_guest_survives_kill_9_of_the_server() {
    let place = Place::new();
    let cases = [("io_uring", "none"), ("threads", "writethrough")];
    let mut disks = Vec::new();
    let mut servers: Vec<(usize, Server)> = Vec::new();
    for (index, (engine, cache)) in cases.into_iter().enumerate() {
        place.image(engine, 64 * MIB);
        let server = place.serve(
            engine,
            &place.path(engine),
            &["--aio", engine, "--cache", cache],
        );
        disks.push(
            Disk::vhost_user(engine, server.socket())
                .with_queues(2)
                .with_reconnect(),
        );
        servers.push((index, server));
    }
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks,
        ..Machine::default()
    })
    .unwrap();

    let mut kept = Vec::new();
    for (index, mut server) in servers {
        let (engine, cache) = cases[index];
        let device = guest.device(engine).unwrap();
        let load = Load::start(&mut guest, &device, 24 * MIB);
        load.wait_for_writes(&mut guest);
        for kill in 0..KILLS {
            server.process().kill().unwrap();
            // The successor finds a stale socket, locks that the kernel has not released yet, and
            // sometimes a front-end that waits already.
            std::thread::sleep(Duration::from_millis(50 * kill as u64));
            let image = place.path(engine);
            server = place.serve(engine, &image, &["--aio", engine, "--cache", cache]);
            std::thread::sleep(Duration::from_millis(700));
        }
        load.expect_running(&mut guest);
        load.finish(&mut guest);
        let log = guest.check("dmesg", Duration::from_secs(60)).unwrap();
        assert!(!log.contains("I/O error"), "the guest saw an error:\n{log}");
        load.verify_on_host(&place.path(engine));
        server.process().expect_running().unwrap();
        kept.push(server);
    }
    guest.power_off().unwrap();
    for server in kept {
        server.stop().unwrap();
    }
}
