//! Tests packed virtqueues with the driver of Linux: kills of the server, pauses, and live
//! migration, in the middle of a verified load.

use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_tests::Place;
use fathom_tests::image::{Image, Kind};
use fathom_tests::load::Load;
use serde_json::json;

use super::migration::{expect_no_io_errors, migrate};

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_secs(120);
const KILLS: u64 = 3;
const PAUSES: u64 = 3;
const ARGS: &[&str] = &["--packed", "--iothreads", "2"];
const DISKS: [(&str, Kind); 2] = [("raw", Kind::RAW), ("qcow2", Kind::QCOW2_SMALL)];

fn serve(place: &Place, images: &[(&str, Image)], side: &str) -> Vec<Server> {
    let serve = |(name, image): &(&str, Image)| image.serve(place, &format!("{name}-{side}"), ARGS);
    images.iter().map(serve).collect()
}

/// Returns a machine whose disks offer packed virtqueues, one of them with two queues.
fn machine(images: &[(&str, Image)], servers: &[Server]) -> Machine {
    let disk = |(queues, ((name, _), server)): (u16, (&(&str, Image), &Server))| {
        Disk::vhost_user(name, server.socket())
            .with_queues(queues)
            .with_reconnect()
            .with_property("packed=on")
    };
    let disks = (1..).zip(images.iter().zip(servers)).map(disk);
    Machine {
        cpus: 2,
        memory_mib: 256,
        disks: disks.collect(),
        ..Machine::default()
    }
}

/// Asserts that the guest's driver has accepted VIRTIO_F_RING_PACKED.
fn expect_packed(guest: &mut Guest, name: &str) {
    let device = guest.device(name).unwrap();
    let device = device.trim_start_matches("/dev/");
    // The file has a character for each feature, the lowest first.
    let features = format!("cut -c 35 /sys/block/{device}/device/features");
    assert_eq!(guest.check(&features, STEP).unwrap().trim(), "1", "{name}");
}

#[test]
fn packed_queues_survive_kills_and_live_migration() {
    let place = Place::new();
    let images = DISKS.map(|(name, kind)| {
        let image = Image::create(place.path(name), kind, 64 * MIB);
        (name, image)
    });
    let mut source_servers = serve(&place, &images, "source");
    let mut source = Guest::boot(&machine(&images, &source_servers)).unwrap();
    for (name, _) in &images {
        expect_packed(&mut source, name);
    }
    let names = DISKS.map(|(name, _)| name);
    let load = Load::start(&mut source, &names, 16 * MIB, 250);
    load.wait_for_writes(&mut source);
    for _ in 0..KILLS {
        for server in &mut source_servers {
            server.process().kill().unwrap();
        }
        images
            .iter()
            .for_each(|(_, image)| image.check_consistent());
        source_servers = serve(&place, &images, "source");
        load.wait_for_more_writes(&mut source);
    }
    for _ in 0..PAUSES {
        source.qmp("stop", json!({})).unwrap();
        source.qmp("cont", json!({})).unwrap();
        load.wait_for_more_writes(&mut source);
    }

    let target_servers = serve(&place, &images, "target");
    let target = Machine {
        incoming: true,
        ..machine(&images, &target_servers)
    };
    let mut target = Guest::start(&target).unwrap();
    migrate(&place.sockets().join("migration"), &mut source, &mut target);
    source.quit().unwrap();
    for server in source_servers {
        server.stop().unwrap();
    }

    load.wait_for_more_writes(&mut target);
    let written = load.finish(&mut target);
    expect_no_io_errors(&mut target);
    target.power_off().unwrap();
    for server in target_servers {
        server.stop().unwrap();
    }
    for (_, image) in &images {
        image.check_clean();
        written.verify_on_host(&image.flat());
    }
}
