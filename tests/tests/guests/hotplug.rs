//! Tests disks that are added to a running server, plugged into a running guest, unplugged and
//! removed.
//!
//! The guest works on another disk of the same server meanwhile.

use std::path::Path;
use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine};
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;
use fathom_tests::{Ended, Place, run};

use super::migration::{expect_no_io_errors, plug, unplug};

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_secs(120);
/// PCI slot behind that of the guest's first disk.
const SLOT: usize = 5;

/// Runs `fathom disk` for the server with this API socket.
fn disk(control: &Path, command: &str, words: &[&str]) -> Ended {
    let control = control.to_str().unwrap();
    let server = match command {
        "add" => vec!["--server", control],
        _ => vec![control, "--disk"],
    };
    run(&[&["disk", command], &server[..], words].concat(), STEP)
}

fn done(ended: Ended) {
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// Waits for the device in that slot, and returns its path.
fn device(guest: &mut Guest) -> String {
    let find = format!(
        "for i in $(seq 600); do
             ls /sys/bus/pci/devices/*:{SLOT:02x}.0/virtio*/block 2>/dev/null && exit 0
             sleep 0.1
         done
         exit 1"
    );
    format!("/dev/{}", guest.check(&find, STEP).unwrap().trim())
}

#[test]
fn disks_of_one_server_come_and_go_under_load() {
    let place = Place::new();
    let stays = Image::create(place.path("stays"), Kind::RAW, 64 * MIB);
    let server = stays.serve(&place, "stays", &[]);
    let control = server.api().unwrap().to_owned();
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks: vec![Disk::vhost_user("stays", server.socket())],
        ..Machine::default()
    })
    .unwrap();
    let load = Load::start(&mut guest, &["stays"], 8 * MIB, 150);
    load.wait_for_writes(&mut guest);

    let socket = place.sockets().join("comes");
    let comes = Image::create(place.path("comes"), Kind::QCOW2, 64 * MIB);
    let (path, at) = (comes.path().to_str().unwrap(), socket.to_str().unwrap());
    let add = ["comes", path, "--format", "qcow2", "--vhost-user", at];
    for round in 0..3 {
        done(disk(&control, "add", &add));
        plug(&mut guest, "comes", &socket, SLOT);
        let device = device(&mut guest);
        let read = format!("dd if={device} bs=4k count=256 2>/dev/null | uniq -c");
        let found = guest.check(&read, STEP).unwrap();
        assert_eq!(
            found.contains(&format!("round {}", round - 1)),
            round > 0,
            "{found}"
        );
        let write = format!("yes 'round {round}' | dd of={device} bs=4k count=256 conv=fsync");
        guest.check(&write, STEP).unwrap();
        // The disk cannot be removed while the guest has it.
        disk(&control, "remove", &["comes"]).refused_with(&["'comes': in use by process"]);
        guest.check(&read, STEP).unwrap();
        unplug(&mut guest, "comes", SLOT);
        done(disk(&control, "remove", &["comes"]));
        assert!(!socket.exists());
        comes.check_clean();
    }

    // With `--force`, a disk is removed although the guest still has it; nothing else is affected.
    done(disk(&control, "add", &add));
    plug(&mut guest, "comes", &socket, SLOT);
    device(&mut guest);
    done(disk(&control, "remove", &["comes", "--force"]));
    comes.check_clean();

    let written = load.finish(&mut guest);
    expect_no_io_errors(&mut guest);
    guest.quit().unwrap();
    server.stop().unwrap();
    stays.check_clean();
    written.verify_on_host(&stays.flat());
}
