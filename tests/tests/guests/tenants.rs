//! Kills tenants with SIGKILL in the middle of verified loads.
//!
//! The supervisor starts each one again, QEMU waits for it at the supervisor's socket, and the
//! guest notices nothing.

use std::process::Command;

use fathom_lab::{Disk, Guest, Machine};
use fathom_testing::{eventually, until};
use fathom_tests::Place;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;

use super::configured::Configured;

const MIB: u64 = 1 << 20;
const KILLS: usize = 4;
const CASES: &[(&str, Kind)] = &[
    ("raw", Kind::RAW),
    ("qcow2", Kind::QCOW2_BACKED),
    ("qed", Kind::QED_SMALL),
];

#[test]
fn the_guest_survives_kill_9_of_its_tenants() {
    let place = Place::new();
    let images = CASES.iter().map(|(name, kind)| {
        let path = place.path(name);
        Image::create(path, *kind, 64 * MIB)
    });
    let images: Vec<_> = images.collect();
    let names: Vec<_> = CASES.iter().map(|(name, _)| *name).collect();
    let disks: Vec<_> = names.iter().copied().zip(&images).collect();
    let server = Configured::start(&place, "sandbox = 'on'\ntenants = true", &disks);
    let disk = |name: &&str| {
        Disk::vhost_user(name, &place.sockets().join(name))
            .with_queues(2)
            .with_reconnect()
    };
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks: names.iter().map(disk).collect(),
        ..Machine::default()
    })
    .unwrap();
    let load = Load::start(&mut guest, &names, 16 * MIB, 400);
    load.wait_for_writes(&mut guest);
    for _ in 0..KILLS {
        let processes = names.iter().map(|name| {
            let pid = eventually("the tenant", || server.process_of(name));
            let kill = Command::new("kill").args(["-9", &pid.to_string()]).status();
            assert!(kill.unwrap().success(), "{name}");
            (name, pid)
        });
        for (name, pid) in processes.collect::<Vec<_>>() {
            let process = || server.process_of(name);
            until("the tenant's successor", || {
                process().is_some_and(|now| now != pid)
            });
        }
        load.wait_for_more_writes(&mut guest);
    }
    let written = load.finish(&mut guest);
    guest.quit().unwrap();
    server.quit();
    for image in &images {
        image.check_clean();
        written.verify_on_host(&image.flat());
    }
}
