//! Tests changes of a disk while a guest works on it: its size, its options, and freezing.

use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine};
use fathom_tests::Place;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;

use super::configured::Configured;
use super::migration::expect_no_io_errors;

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_secs(120);
const CASES: &[(&str, Kind)] = &[
    ("raw", Kind::RAW),
    ("qcow2", Kind::QCOW2),
    ("qed", Kind::QED),
];

/// A guest under a verified load on each disk.
struct Loaded {
    place: Place,
    images: Vec<Image>,
    names: Vec<&'static str>,
    server: Configured,
    guest: Guest,
    load: Load,
}

fn start() -> Loaded {
    let place = Place::new();
    let images = CASES.iter().map(|(name, kind)| {
        let path = place.path(name);
        Image::create(path, *kind, 64 * MIB)
    });
    let images: Vec<_> = images.collect();
    let names: Vec<_> = CASES.iter().map(|(name, _)| *name).collect();
    let disks: Vec<_> = names.iter().copied().zip(&images).collect();
    let server = Configured::start(&place, "", &disks);
    let disk = |name: &&str| Disk::vhost_user(name, &place.sockets().join(name)).with_queues(2);
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks: names.iter().map(disk).collect(),
        ..Machine::default()
    })
    .unwrap();
    let load = Load::start(&mut guest, &names, 16 * MIB, 100);
    load.wait_for_writes(&mut guest);
    Loaded {
        place,
        images,
        names,
        server,
        guest,
        load,
    }
}

impl Loaded {
    /// Waits until the device has this size.
    fn expect_size(&mut self, name: &str, bytes: u64) {
        let device = self.guest.device(name).unwrap();
        let kernel_name = device.trim_start_matches("/dev/");
        let wait = format!(
            "for i in $(seq 300); do
                 [ $(cat /sys/block/{kernel_name}/size) = {} ] && exit 0
                 sleep 0.1
             done
             cat /sys/block/{kernel_name}/size
             exit 1",
            bytes / 512
        );
        self.guest.check(&wait, STEP).unwrap();
    }

    fn resize(&self, name: &str, words: &[&str]) {
        self.server
            .done(&["resize"], &[&["--disk", name], words].concat());
    }

    fn finish(mut self) {
        let written = self.load.finish(&mut self.guest);
        expect_no_io_errors(&mut self.guest);
        self.guest.quit().unwrap();
        self.server.quit();
        for image in &self.images {
            image.check_clean();
            written.verify_on_host(&image.flat());
        }
        drop(self.place);
    }
}

#[test]
fn a_guest_hears_of_another_size_and_uses_it() {
    let mut all = start();
    for name in all.names.clone() {
        all.resize(name, &["96M"]);
        all.expect_size(name, 96 * MIB);
    }
    for name in all.names.clone() {
        let device = all.guest.device(name).unwrap();
        // The new part reads as zeroes, and keeps data that is written to it.
        let use_it = format!(
            "[ $(dd if={device} bs=1M skip=64 count=32 2>/dev/null | tr -d '\\000' | wc -c) = 0 ] &&
             yes {name} | head -c 8388608 >/tmp/new &&
             dd if=/tmp/new of={device} bs=1M seek=80 conv=fsync 2>/dev/null &&
             echo 3 >/proc/sys/vm/drop_caches &&
             dd if={device} bs=1M count=8 skip=80 2>/dev/null | cmp - /tmp/new"
        );
        all.guest.check(&use_it, STEP).unwrap();
    }
    // Shrinking must be requested explicitly, and this format cannot shrink.
    let refused = |words: &[&str], why| all.server.ask(&["resize"], words).refused_with(&[why]);
    refused(&["--disk", "raw", "64M"], "--shrink");
    refused(
        &["--disk", "qed", "64M", "--shrink"],
        "qed images cannot shrink",
    );
    for name in ["raw", "qcow2"] {
        all.resize(name, &["64M", "--shrink"]);
        all.expect_size(name, 64 * MIB);
    }
    all.finish();
}

#[test]
fn guest_requests_wait_while_options_change() {
    let all = start();
    for name in all.names.clone() {
        for option in [
            "cache=writethrough",
            "iothreads=2",
            "cache=none",
            "poll=20us",
            "iothreads=1",
        ] {
            all.server
                .done(&["disk", "change"], &["--disk", name, option]);
        }
    }
    for name in all.names.clone() {
        all.server.done(&["disk", "freeze"], &["--disk", name]);
    }
    // The server has released the images: QEMU's tools can lock them, and find them clean.
    for image in &all.images {
        image.check_unused();
    }
    std::thread::sleep(Duration::from_secs(1));
    for name in all.names.clone() {
        all.server.done(&["disk", "thaw"], &["--disk", name]);
    }
    all.finish();
}
