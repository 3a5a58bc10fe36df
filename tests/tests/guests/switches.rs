//! Tests disks whose images are replaced while a guest works on them, and servers that are killed
//! just afterwards.
//!
//! QEMU keeps an in-flight area for the server, which then belongs to another format.

use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_testing::until;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;
use fathom_tests::{Place, run};

use super::migration::expect_no_io_errors;

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_secs(120);
const LOAD_BYTES: u64 = 16 * MIB;
const RATE: u32 = 150;

/// The first kind of each disk, and the kinds of the targets of its mirrors.
const CASES: &[(&str, &[Kind])] = &[
    ("up", &[Kind::RAW, Kind::QCOW2_SMALL, Kind::RAW]),
    ("down", &[Kind::QCOW2_BACKED, Kind::RAW, Kind::QCOW2]),
    ("across", &[Kind::QED_SMALL, Kind::QCOW2, Kind::QED_SMALL]),
];

struct Served {
    name: &'static str,
    kinds: &'static [Kind],
    image: Image,
    /// The backing image, while the disk is on top of another one.
    below: Option<Image>,
    server: Server,
}

impl Served {
    fn start(place: &Place, (name, kinds): (&'static str, &'static [Kind])) -> Self {
        let image = Image::create(place.path(name), kinds[0], 64 * MIB);
        let server = image.serve(place, name, &[]);
        Self {
            name,
            kinds,
            image,
            below: None,
            server,
        }
    }

    fn disk(&self) -> Disk {
        Disk::vhost_user(self.name, self.server.socket())
            .with_queues(2)
            .with_reconnect()
    }

    fn ask(&mut self, words: &[&str], more: &[&str]) {
        let pid = self.server.process().pid().to_string();
        let ended = run(&[words, &[&*pid], more].concat(), STEP);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }

    /// Replaces the image by a copy of that kind.
    fn become_kind(&mut self, place: &Place, n: usize) {
        let target = Image::create(
            place.path(&format!("{}-{n}", self.name)),
            self.kinds[n],
            64 * MIB,
        );
        let path = target.path().to_str().unwrap().to_owned();
        self.ask(
            &["mirror", "start"],
            &[&path, "-O", target.format(), "--active"],
        );
        self.ask(&["mirror", "complete"], &["--transient"]);
        self.image = target;
    }

    fn put_on_top(&mut self, place: &Place) {
        let path = place.path(&format!("{}-top", self.name));
        self.ask(&["snapshot"], &[path.to_str().unwrap(), "--transient"]);
        let top = Image::at(path, Kind::QCOW2_BACKED);
        self.below = Some(std::mem::replace(&mut self.image, top));
    }

    /// Commits the top image into the one below. With `more` options, the server is killed before
    /// the end.
    fn commit(&mut self, more: &[&str]) {
        let below = self
            .below
            .as_ref()
            .unwrap()
            .path()
            .to_str()
            .unwrap()
            .to_owned();
        self.ask(&["commit"], &[&[&*below, "--transient"], more].concat());
        if more.is_empty() {
            self.image = self.below.take().unwrap();
        }
    }

    /// Streams the backing image into the top image.
    fn become_whole(&mut self, more: &[&str]) {
        self.ask(&["stream", "start"], more);
    }

    fn is_whole(&mut self) -> bool {
        let pid = self.server.process().pid().to_string();
        let shown = run(&["stream", "show", &pid], STEP);
        assert!(!shown.stdout.contains("failed"), "{shown:?}");
        shown.stdout.starts_with("done")
    }

    /// Kills the server; its successor serves the last image.
    fn replace(&mut self, place: &Place) {
        self.server.process().kill().unwrap();
        self.image.check_consistent();
        self.server = self.image.serve(place, self.name, &[]);
    }
}

#[test]
fn a_guest_goes_on_with_other_images_whoever_is_killed() {
    let place = Place::new();
    let mut all: Vec<_> = CASES
        .iter()
        .map(|case| Served::start(&place, *case))
        .collect();
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks: all.iter().map(Served::disk).collect(),
        ..Machine::default()
    })
    .unwrap();
    let names: Vec<&str> = CASES.iter().map(|(name, _)| *name).collect();
    let load = Load::start(&mut guest, &names, LOAD_BYTES, RATE);
    load.wait_for_writes(&mut guest);
    for n in 1..3 {
        for served in &mut all {
            served.become_kind(&place, n);
        }
        load.wait_for_more_writes(&mut guest);
        for served in &mut all {
            served.replace(&place);
        }
        load.wait_for_more_writes(&mut guest);
    }
    for served in &mut all {
        served.put_on_top(&place);
    }
    load.wait_for_more_writes(&mut guest);
    for served in &mut all {
        served.replace(&place);
    }
    load.wait_for_more_writes(&mut guest);
    all[0].commit(&[]);
    all[1].become_whole(&["--wait"]);
    all[2].commit(&["--until-ready"]);
    load.wait_for_more_writes(&mut guest);
    for served in &mut all {
        served.replace(&place);
    }
    load.wait_for_more_writes(&mut guest);
    // The rings stop and start again, while mirrors wait and a stream runs.
    all[2].become_whole(&["--speed", "8M"]);
    for served in &mut all[..2] {
        let target = place.path(&format!("{}-end", served.name));
        served.ask(&["mirror", "start"], &[target.to_str().unwrap(), "--wait"]);
    }
    let written = load.finish(&mut guest);
    expect_no_io_errors(&mut guest);
    guest.reboot().unwrap();
    until("the stream's end", || all[2].is_whole());
    for served in &mut all[..2] {
        served.ask(&["mirror", "complete"], &["--transient"]);
        served.image = Image::at(place.path(&format!("{}-end", served.name)), Kind::RAW);
    }
    guest.power_off().unwrap();
    for served in all {
        served.server.stop().unwrap();
        // The server of this image may have been killed.
        served.image.check_consistent();
        written.verify_on_host(&served.image.flat());
    }
}
