//! Tests servers that are upgraded again and again in the middle of verified loads.
//!
//! QEMU could not connect again, and the guest notices nothing.

use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine};
use fathom_tests::Place;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;

use super::configured::Configured;
use super::migration::expect_no_io_errors;

const MIB: u64 = 1 << 20;
const CASES: &[(&str, Kind)] = &[
    ("raw", Kind::RAW),
    ("qcow2", Kind::QCOW2_SUBCLUSTERS),
    ("qed", Kind::QED),
];

/// Returns the number of upgrades: 10, or that of `FATHOM_UPGRADES`.
fn upgrades() -> usize {
    let said = std::env::var("FATHOM_UPGRADES").ok();
    said.map_or(10, |count| count.parse().expect("a number"))
}

/// Prints how long queues stood still. The test does not check it, because it depends on the load
/// of the machine.
fn tell(what: &str, mut pauses: Vec<f64>) {
    pauses.sort_by(f64::total_cmp);
    let at = |part: f64| pauses[((pauses.len() - 1) as f64 * part) as usize];
    eprintln!(
        "{what}: {} upgrades; queues stood still for {:.1} ms (median), {:.1} ms (longest)",
        pauses.len(),
        at(0.5),
        at(1.0)
    );
}

fn check(head: &str, has_tenants: bool) {
    let place = Place::new();
    let images = CASES.iter().map(|(name, kind)| {
        let path = place.path(name);
        Image::create(path, *kind, 64 * MIB)
    });
    let images: Vec<_> = images.collect();
    let names: Vec<_> = CASES.iter().map(|(name, _)| *name).collect();
    let disks: Vec<_> = names.iter().copied().zip(&images).collect();
    let server = Configured::start(&place, head, &disks);
    let disk = |name: &&str| Disk::vhost_user(name, &place.sockets().join(name)).with_queues(2);
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks: names.iter().map(disk).collect(),
        ..Machine::default()
    })
    .unwrap();
    let load = Load::start(&mut guest, &names, 16 * MIB, 150);
    load.wait_for_writes(&mut guest);
    let processes = |server: &Configured| {
        let all = names.iter().map(|name| server.process_of(name).unwrap());
        all.collect::<Vec<_>>()
    };
    let mut pauses = Vec::new();
    for round in 0..upgrades() {
        let before = processes(&server);
        let answer = server.json(&["upgrade"], &[]);
        pauses.push(answer["pause_ms"].as_f64().unwrap());
        assert_eq!(answer["tenants"].is_array(), has_tenants, "{answer}");
        let now = processes(&server);
        let is_new = before.iter().zip(&now).all(|(old, new)| old != new);
        assert!(is_new, "after {round}: {before:?}, {now:?}");
        // The next upgrade comes at another moment of the load.
        std::thread::sleep(Duration::from_millis(97 * (round as u64 % 5)));
    }
    let written = load.finish(&mut guest);
    expect_no_io_errors(&mut guest);
    guest.quit().unwrap();
    server.quit();
    for image in &images {
        image.check_clean();
        written.verify_on_host(&image.flat());
    }
    tell(head, pauses);
}

#[test]
fn a_guest_sees_nothing_of_its_servers_upgrades() {
    check("", false);
}

#[test]
fn a_guest_sees_nothing_of_upgrades_of_a_server_with_tenants() {
    check("tenants = true", true);
}
