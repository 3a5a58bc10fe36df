//! Tests guests that migrate while their disks are copied or have their backing chains changed.

use std::thread::{self, JoinHandle};
use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_testing::until;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;
use fathom_tests::{Ended, Place, run};

use super::migration::{expect_no_io_errors, migrate};

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_secs(120);
/// Number of blocks that the load writes per second.
const RATE: u32 = 200;

const CHANGED: &str = "other programs may have changed the disk";

/// The disks, each named after the job that runs on it.
const DISKS: [(&str, Kind); 4] = [
    ("mirror", Kind::RAW),
    ("backup", Kind::QCOW2_SMALL),
    ("stream", Kind::QCOW2_BACKED),
    ("commit", Kind::QED_SMALL),
];

struct Host {
    servers: Vec<Server>,
}

impl Host {
    /// Serves the present images of the disks.
    fn new(place: &Place, side: &str, images: &[Image]) -> Self {
        let serve = |(image, (name, _)): (&Image, (&str, Kind))| {
            image.serve(place, &format!("{name}-{side}"), &[])
        };
        let servers = images.iter().zip(DISKS).map(serve).collect();
        Self { servers }
    }

    fn machine(&self, incoming: bool) -> Machine {
        let disk =
            |(server, (name, _)): (&Server, (&str, Kind))| Disk::vhost_user(name, server.socket());
        Machine {
            memory_mib: 256,
            disks: self.servers.iter().zip(DISKS).map(disk).collect(),
            incoming,
            ..Machine::default()
        }
    }

    /// Runs a command on that disk. Returns its output.
    fn ask(&mut self, disk: usize, words: &[&str], more: &[&str]) -> String {
        let pid = self.servers[disk].process().pid().to_string();
        let ended = run(&[words, &[&*pid], more].concat(), STEP);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.stdout
    }

    /// Starts jobs that take longer than a migration.
    fn begin_jobs(&mut self, place: &Place, below: &Image) -> JoinHandle<Ended> {
        let copy = place.path("copy");
        let slowly = ["--speed", "1M"];
        self.ask(
            0,
            &["mirror", "start"],
            &[&[copy.to_str().unwrap(), "--active"], &slowly[..]].concat(),
        );
        self.ask(1, &["backup", "start"], &[]);
        self.ask(2, &["stream", "start"], &slowly);
        let below = below.path().to_str().unwrap().to_owned();
        let pid = self.servers[3].process().pid().to_string();
        let commit = thread::spawn(move || {
            run(
                &[&["commit", &pid, &below, "--transient"], &slowly[..]].concat(),
                STEP,
            )
        });
        until("a mirror", || !self.show(3, "mirror").contains("no mirror"));
        commit
    }

    fn show(&mut self, disk: usize, kind: &str) -> String {
        let pid = self.servers[disk].process().pid().to_string();
        let ended = run(&[kind, "show", &pid], STEP);
        ended.stdout + &ended.stderr
    }

    fn stop(self) {
        for server in self.servers {
            server.stop().unwrap();
        }
    }
}

/// Both hosts reach the images. When the guest migrates, the jobs at the source end or wait.
///
/// When the guest returns with images that have changed meanwhile, no copy of them is trusted.
#[test]
fn a_guest_migrates_while_its_disks_are_copied_and_comes_back() {
    let place = Place::new();
    let mut images = DISKS.map(|(name, kind)| Image::create(place.path(name), kind, 64 * MIB));
    let mut here = Host::new(&place, "here", &images);
    let mut guest = Guest::boot(&here.machine(false)).unwrap();
    let names = DISKS.map(|(name, _)| name);
    let load = Load::start(&mut guest, &names, 24 * MIB, RATE);
    load.wait_for_writes(&mut guest);
    let top = place.path("top");
    here.ask(3, &["snapshot"], &[top.to_str().unwrap(), "--transient"]);
    let below = std::mem::replace(&mut images[3], Image::at(top, Kind::QCOW2_BACKED));
    load.wait_for_more_writes(&mut guest);

    let there = Host::new(&place, "there", &images);
    let mut other = Guest::start(&there.machine(true)).unwrap();
    let commit = here.begin_jobs(&place, &below);
    migrate(&place.sockets().join("there"), &mut guest, &mut other);
    guest.quit().unwrap();
    load.wait_for_more_writes(&mut other);
    for disk in [0, 3] {
        let shown = here.show(disk, "mirror");
        assert!(shown.starts_with("waiting: "), "{shown}");
    }
    // The stream may have ended before. The other server was then started with a longer chain.
    let shown = here.show(2, "stream");
    assert!(
        shown.starts_with("waiting: ") || shown.starts_with("done: "),
        "{shown}"
    );
    let of = "the virtual machine disconnected from the disk";
    assert!(here.ask(1, &["info"], &[]).contains(of));

    let mut back = Guest::start(&here.machine(true)).unwrap();
    migrate(&place.sockets().join("back"), &mut other, &mut back);
    other.quit().unwrap();
    there.stop();
    load.wait_for_more_writes(&mut back);
    let shown = here.show(0, "mirror");
    assert!(
        shown.starts_with("failed: ") && shown.contains(CHANGED),
        "{shown}"
    );
    let ended = commit.join().unwrap();
    assert!(
        ended.code == Some(1) && ended.stderr.contains(CHANGED),
        "{ended:?}"
    );
    let written = load.finish(&mut back);
    expect_no_io_errors(&mut back);
    until("the stream's end", || {
        here.show(2, "stream").starts_with("done: ")
    });
    back.power_off().unwrap();
    here.stop();
    for image in &images {
        image.check_clean();
        written.verify_on_host(&image.flat());
    }
}
