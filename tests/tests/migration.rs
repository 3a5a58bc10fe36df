//! What QEMU does to a running disk: pauses under load, live migration to another QEMU with a
//! server of its own, hot unplug and plug.

use std::time::{Duration, Instant};

use fathom_lab::{Disk, Guest, Machine};
use fathom_tests::Place;
use fathom_tests::load::Load;
use serde_json::json;

const MIB: u64 = 1 << 20;
const STEP: Duration = Duration::from_secs(120);

#[test]
fn a_guest_migrates_under_verified_load() {
    let place = Place::new();
    let image = place.image("disk", 64 * MIB);
    let source_server = place.serve("source", &image, &[]);
    let target_server = place.serve("target", &image, &[]);
    let machine = |socket| Machine {
        cpus: 2,
        memory_mib: 256,
        disks: vec![Disk::vhost_user("disk", socket)],
        ..Machine::default()
    };
    let mut source = Guest::boot(&machine(source_server.socket())).unwrap();
    let target = Machine {
        incoming: true,
        ..machine(target_server.socket())
    };
    let mut target = Guest::start(&target).unwrap();

    let device = source.device("disk").unwrap();
    let load = Load::start(&mut source, &device, 32 * MIB);
    load.wait_for_writes(&mut source);

    let channel = place.sockets().join("migration");
    let uri = format!("unix:{}", channel.display());
    target.qmp("migrate-incoming", json!({"uri": uri})).unwrap();
    source.qmp("migrate", json!({"uri": uri})).unwrap();
    wait_migrated(&mut source);
    target.wait_event("RESUME", STEP).unwrap();
    source.quit().unwrap();
    source_server.stop().unwrap();

    load.expect_running(&mut target);
    load.finish(&mut target);
    expect_no_io_errors(&mut target);
    target.power_off().unwrap();
    target_server.stop().unwrap();
    load.verify_on_host(&image);
}

fn wait_migrated(source: &mut Guest) {
    let deadline = Instant::now() + STEP;
    loop {
        let state = source.qmp("query-migrate", json!({})).unwrap();
        match state["status"].as_str() {
            Some("completed") => return,
            Some("failed" | "cancelled") => panic!("migration: {state}\n{}", source.qemu_log()),
            _ if Instant::now() > deadline => panic!("migration takes too long: {state}"),
            _ => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn expect_no_io_errors(guest: &mut Guest) {
    let log = guest.check("dmesg", STEP).unwrap();
    let errors: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("I/O error"))
        .collect();
    assert!(errors.is_empty(), "the guest saw errors: {errors:#?}");
}

#[test]
fn pauses_and_hot_plug_lose_nothing() {
    let place = Place::new();
    let images = ["stays", "leaves"].map(|name| place.image(name, 64 * MIB));
    let [stays, leaves] =
        ["stays", "leaves"].map(|name| place.serve(name, &place.path(name), &["--queues", "2"]));
    let disks = vec![
        Disk::vhost_user("stays", stays.socket()),
        Disk::vhost_user("leaves", leaves.socket()),
    ];
    let mut guest = Guest::boot(&Machine {
        cpus: 2,
        disks,
        ..Machine::default()
    })
    .unwrap();

    let device = guest.device("stays").unwrap();
    let load = Load::start(&mut guest, &device, 16 * MIB);
    load.wait_for_writes(&mut guest);
    for _ in 0..8 {
        guest.qmp("stop", json!({})).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        guest.qmp("cont", json!({})).unwrap();
        std::thread::sleep(Duration::from_millis(150));
    }

    // The other disk goes and comes back while the first is under load.
    let device = guest.device("leaves").unwrap();
    guest
        .check(
            &format!("yes fathom | dd of={device} bs=4k count=256 conv=fsync"),
            STEP,
        )
        .unwrap();
    for _ in 0..2 {
        unplug_and_plug(&mut guest, leaves.socket());
        let device = guest.device("leaves").unwrap();
        let count = format!("dd if={device} bs=4k count=256 2>/dev/null | grep -c '^fathom$'");
        let lines: u64 = guest.check(&count, STEP).unwrap().trim().parse().unwrap();
        assert!(
            lines >= MIB / 7,
            "the disk came back without its data: {lines} lines"
        );
    }

    load.finish(&mut guest);
    expect_no_io_errors(&mut guest);
    guest.power_off().unwrap();
    stays.stop().unwrap();
    leaves.stop().unwrap();
    load.verify_on_host(&images[0]);
}

fn unplug_and_plug(guest: &mut Guest, socket: &std::path::Path) {
    guest.qmp("device_del", json!({"id": "leaves"})).unwrap();
    while guest.wait_event("DEVICE_DELETED", STEP).unwrap()["device"] != "leaves" {}
    guest.check("for i in $(seq 50); do ls /sys/block | grep -c vd | grep -q 2 && exit 0; sleep 0.1; done; exit 1", STEP).unwrap();
    guest
        .qmp("chardev-remove", json!({"id": "leaves-socket"}))
        .unwrap();
    let address = json!({"type": "unix", "data": {"path": socket}});
    let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
    guest
        .qmp(
            "chardev-add",
            json!({"id": "leaves-socket", "backend": backend}),
        )
        .unwrap();
    let device = json!({
        "driver": "vhost-user-blk-pci", "id": "leaves", "chardev": "leaves-socket", "addr": "5"
    });
    guest.qmp("device_add", device).unwrap();
}
