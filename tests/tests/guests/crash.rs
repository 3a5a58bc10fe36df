//! Kills servers with SIGKILL in the middle of verified loads.
//!
//! QEMU connects to each successor, which serves the requests in flight again, and the guest
//! notices nothing. The image that a killed server leaves is consistent each time.

use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_tests::Place;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;

const MIB: u64 = 1 << 20;
const KILLS: u64 = 4;
const LOAD_BYTES: u64 = 16 * MIB;
/// Blocks per second; all loads together are the maximum of the emulated guest.
const RATE: u32 = 250;

/// A disk, and how it is served.
struct Case {
    name: &'static str,
    kind: Kind,
    args: &'static [&'static str],
}

const CASES: &[Case] = &[
    Case {
        name: "io_uring",
        kind: Kind::RAW,
        args: &["--aio", "io_uring"],
    },
    Case {
        name: "threads",
        kind: Kind::RAW,
        args: &["--aio", "threads", "--cache", "writethrough"],
    },
    Case {
        name: "qcow2-backed",
        kind: Kind::QCOW2_BACKED,
        args: &["--iothreads", "2"],
    },
    Case {
        name: "qcow2-subclusters",
        kind: Kind::QCOW2_SUBCLUSTERS,
        args: &["--aio", "native"],
    },
    Case {
        name: "qcow2-small",
        kind: Kind::QCOW2_SMALL,
        args: &["--aio", "threads", "--cache", "writeback"],
    },
    Case {
        name: "qcow2-through",
        kind: Kind::QCOW2_SMALL,
        args: &["--iothreads", "2", "--cache", "writethrough"],
    },
    Case {
        name: "qed-small",
        kind: Kind::QED_SMALL,
        args: &["--iothreads", "2"],
    },
];

struct Served {
    case: &'static Case,
    image: Image,
    server: Server,
}

impl Served {
    fn start(place: &Place, case: &'static Case) -> Self {
        let image = Image::create(place.path(case.name), case.kind, 64 * MIB);
        let server = image.serve(place, case.name, case.args);
        Self {
            case,
            image,
            server,
        }
    }

    fn disk(&self) -> Disk {
        Disk::vhost_user(self.case.name, self.server.socket())
            .with_queues(2)
            .with_reconnect()
    }

    /// Kills the server and starts its successor. The successor finds a stale socket, locks that
    /// the kernel has not released yet, and sometimes a front-end that waits already.
    fn replace(&mut self, place: &Place, pause: Duration) {
        self.server.process().kill().unwrap();
        self.image.check_consistent();
        std::thread::sleep(pause);
        self.server = self.image.serve(place, self.case.name, self.case.args);
    }
}

#[test]
fn the_guest_survives_kill_9_of_the_server() {
    let place = Place::new();
    let mut all: Vec<Served> = CASES
        .iter()
        .map(|case| Served::start(&place, case))
        .collect();
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks: all.iter().map(Served::disk).collect(),
        ..Machine::default()
    })
    .unwrap();

    let names: Vec<&str> = CASES.iter().map(|case| case.name).collect();
    let load = Load::start(&mut guest, &names, LOAD_BYTES, RATE);
    load.wait_for_writes(&mut guest);
    for kill in 0..KILLS {
        for served in &mut all {
            served.replace(&place, Duration::from_millis(30 * kill));
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    let written = load.finish(&mut guest);
    let log = guest.check("dmesg", Duration::from_secs(60)).unwrap();
    assert!(!log.contains("I/O error"), "the guest saw an error:\n{log}");
    guest.power_off().unwrap();
    for served in all {
        served.server.stop().unwrap();
        served.image.check_consistent();
        written.verify_on_host(&served.image.flat());
    }
}
