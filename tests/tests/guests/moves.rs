//! A guest that moves from one host to another with its disk, again and again.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_tests::Place;
use fathom_tests::hosts::Hosts;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;
use serde_json::json;

use super::migration::{expect_no_io_errors, wait_migrated};

const STEP: Duration = Duration::from_secs(120);
const SIZE: u64 = 512 << 20;

/// Blocks that its load writes each second.
const RATE: u32 = 300;

/// How often it moves: more if somebody wants to know it exactly.
fn moves_wanted() -> usize {
    let wanted = env::var("FATHOM_MOVES").ok();
    wanted.map_or(4, |wanted| wanted.parse().expect("a number"))
}

/// One host's part: its server, and the guest that it has.
struct Stay {
    server: Server,
    guest: Guest,
    image: Image,
}

/// All that the moves have in common.
struct Moves {
    hosts: Hosts,
    place: Place,
    certificates: PathBuf,
}

impl Moves {
    fn new() -> Moves {
        let place = Place::new();
        let certificates = place.path("tls");
        make_certificates(&certificates);
        Moves {
            hosts: Hosts::new(),
            place,
            certificates,
        }
    }

    fn image(&self, n: usize) -> Image {
        let kind = [Kind::RAW, Kind::QCOW2, Kind::RAW, Kind::QED][n % 4];
        let path = self.place.path(&format!("disk-{n}"));
        let _ = std::fs::remove_file(&path);
        let mut record = path.clone().into_os_string();
        record.push(".pull");
        let _ = std::fs::remove_file(record);
        Image::create(path, kind, SIZE)
    }

    /// The nth server, on a host of its own; it pulls from the one before.
    fn serve(&self, n: usize, image: &Image) -> Server {
        let certificates = self.certificates.display().to_string();
        let from = self.hosts.address((n + 1) % 2);
        let uri = format!("nbds://{from}/d?tls-certificates={certificates}&tls-hostname=localhost");
        let mut args = vec![
            "--nbd",
            "tcp:0.0.0.0:10809",
            "--export-name",
            "d",
            "--nbd-move",
            "--tls-certificates",
            &certificates,
            "--tls-verify-peer",
        ];
        if n > 0 {
            args.extend(["--pull", &uri]);
        }
        let name = format!("server-{n}");
        self.hosts
            .on(n % 2, || image.serve(&self.place, &name, &args))
    }

    fn machine(&self, server: &Server, incoming: bool) -> Machine {
        Machine {
            cpus: 2,
            memory_mib: 192,
            disks: vec![Disk::vhost_user("disk", server.socket())],
            incoming,
            ..Machine::default()
        }
    }

    fn begin(&self) -> Stay {
        let image = self.image(0);
        let server = self.serve(0, &image);
        let machine = self.machine(&server, false);
        let guest = self.hosts.on(0, || Guest::boot(&machine).unwrap());
        Stay {
            server,
            guest,
            image,
        }
    }

    /// What waits for the guest on the other host: the disk is coming.
    fn prepare(&self, n: usize) -> Stay {
        let image = self.image(n);
        let mut server = self.serve(n, &image);
        wait_for_log(&mut server, "its guest may come");
        let machine = self.machine(&server, true);
        let guest = self.hosts.on(n % 2, || Guest::start(&machine).unwrap());
        Stay {
            server,
            guest,
            image,
        }
    }

    fn migrate(&self, from: &mut Stay, to: &mut Stay, n: usize) {
        let port = 4000 + n % 100;
        let listen = json!({"uri": format!("tcp:0.0.0.0:{port}")});
        to.guest.qmp("migrate-incoming", listen).unwrap();
        let address = self.hosts.address(n % 2);
        let uri = json!({"uri": format!("tcp:{address}:{port}")});
        from.guest.qmp("migrate", uri).unwrap();
    }
}

fn wait_for_log(server: &mut Server, words: &str) {
    let deadline = Instant::now() + STEP;
    while !server.process().log().contains(words) {
        assert!(
            Instant::now() < deadline,
            "no '{words}': {}",
            server.process().log()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// One key and certificate for all, in both roles.
fn make_certificates(dir: &Path) {
    std::fs::create_dir(dir).unwrap();
    let script = "cd \"$0\"
        openssl req -x509 -nodes -newkey rsa:2048 -days 2 -subj /CN=ours \
            -keyout ca-key.pem -out ca-cert.pem 2>/dev/null
        openssl req -nodes -newkey rsa:2048 -subj /CN=localhost -out request \
            -keyout server-key.pem 2>/dev/null
        echo 'subjectAltName=DNS:localhost' >names
        openssl x509 -req -in request -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 \
            -extfile names -out server-cert.pem 2>/dev/null
        cp server-key.pem client-key.pem
        cp server-cert.pem client-cert.pem";
    let made = Command::new("sh").args(["-ec", script]).arg(dir).status();
    assert!(made.unwrap().success());
}

#[test]
fn a_guest_and_its_disk_move_between_hosts_under_verified_load() {
    let moves = Moves::new();
    let many = moves_wanted();
    let bytes = (u64::from(RATE) * 4096 * 10 * many as u64).min(SIZE);
    let mut here = moves.begin();
    let load = Load::start(&mut here.guest, &["disk"], bytes, RATE);
    load.wait_for_writes(&mut here.guest);
    for n in 1..=many {
        let mut there = moves.prepare(n);
        moves.migrate(&mut here, &mut there, n);
        wait_migrated(&mut here.guest);
        there.guest.wait_event("RESUME", STEP).unwrap();
        wait_for_log(&mut there.server, "all of it is here");
        // What was left there is of no use any more.
        here.guest.quit().unwrap();
        here.server.stop().unwrap();
        std::fs::remove_file(here.image.path()).unwrap();
        here = there;
    }
    load.expect_running(&mut here.guest);
    load.finish(&mut here.guest);
    expect_no_io_errors(&mut here.guest);
    here.guest.power_off().unwrap();
    here.server.stop().unwrap();
    here.image.check_clean();
    load.verify_on_host(&here.image.flat());
}

/// Whatever of the other host dies before the guest is there, it goes on where it is.
#[test]
fn a_guest_whose_move_is_interrupted_goes_on_where_it_is() {
    let moves = Moves::new();
    let mut here = moves.begin();
    let load = Load::start(&mut here.guest, &["disk"], 48 << 20, RATE);
    load.wait_for_writes(&mut here.guest);
    let speed = |guest: &mut Guest, bytes: u64| {
        let bandwidth = json!({ "max-bandwidth": bytes });
        guest.qmp("migrate-set-parameters", bandwidth).unwrap();
    };
    // So that it takes long enough to be interrupted.
    speed(&mut here.guest, 1 << 20);
    for delay in [0, 300, 900] {
        // The server that copies, then the machine that was to be.
        for what in ["server", "machine"] {
            let mut there = moves.prepare(1);
            moves.migrate(&mut here, &mut there, 1);
            std::thread::sleep(Duration::from_millis(delay));
            if what == "server" {
                kill(there.server.process().pid());
            }
            kill(there.guest.pid());
            drop(there);
            wait_failed(&mut here.guest);
            load.wait_for_more_writes(&mut here.guest);
        }
    }
    speed(&mut here.guest, 1 << 30);
    let mut there = moves.prepare(1);
    moves.migrate(&mut here, &mut there, 1);
    wait_migrated(&mut here.guest);
    there.guest.wait_event("RESUME", STEP).unwrap();
    here.guest.quit().unwrap();
    load.finish(&mut there.guest);
    expect_no_io_errors(&mut there.guest);
    there.guest.power_off().unwrap();
    there.server.stop().unwrap();
    load.verify_on_host(&there.image.flat());
}

fn kill(pid: u32) {
    let killed = Command::new("kill")
        .args(["-KILL", &pid.to_string()])
        .status();
    assert!(killed.unwrap().success());
}

/// The migration has come to nothing, and the guest runs.
fn wait_failed(source: &mut Guest) {
    let deadline = Instant::now() + STEP;
    loop {
        let state = source.qmp("query-migrate", json!({})).unwrap();
        match state["status"].as_str() {
            Some("failed" | "cancelled") => break,
            Some("completed") => panic!("it was to be interrupted"),
            _ if Instant::now() > deadline => panic!("it goes on: {state}"),
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    }
    let status = source.qmp("query-status", json!({})).unwrap();
    assert_eq!(status["running"], true, "{status}");
}
