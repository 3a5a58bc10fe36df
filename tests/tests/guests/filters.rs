//! Tests filters with guests, and with QEMU, whose main loop waits while a queue is stopped.

use std::path::Path;
use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_tests::{Place, fathom};
use serde_json::{Value, json};

const STEP: Duration = Duration::from_secs(120);

fn serve(place: &Place, name: &str, filters: &[&str]) -> Server {
    let options = filters.iter().flat_map(|filter| ["--filter", *filter]);
    let args: Vec<_> = ["--json"].into_iter().chain(options).collect();
    Server::fathom(&fathom(), place.sockets(), name, "memory:64M", &args)
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn ask(args: &[&str]) -> String {
    let program = fathom();
    fathom_lab::run(&program.to_string_lossy(), args).unwrap()
}

fn set(server: &Server, filter: &str, option: &str) {
    let control = server.api().unwrap().to_string_lossy();
    ask(&["set", &control, filter, option]);
}

/// Returns the mean time that reads spend in a stage, in ns.
fn mean(server: &Server, stage: &str) -> f64 {
    let control = server.api().unwrap().to_string_lossy();
    let stats: Value = serde_json::from_str(&ask(&["stats", &control, "--json"])).unwrap();
    let operations = stats["operations"].as_array().unwrap();
    let read = operations.iter().find(|o| o["op"] == "read").unwrap();
    let stages = read["stages"].as_array().unwrap();
    let stage = stages.iter().find(|s| s["stage"] == stage).unwrap();
    stage["mean_ns"].as_f64().unwrap()
}

fn read(device: &str, skip: u32, count: u32) -> String {
    format!("dd if={device} of=/dev/null bs=4k skip={skip} count={count} iflag=direct")
}

/// Returns the seconds that the guest takes to read `count` blocks one after the other.
fn seconds(guest: &mut Guest, device: &str, count: u32) -> f64 {
    let script = format!(
        "read before rest </proc/uptime
         {} 2>/dev/null
         read after rest </proc/uptime
         echo $before $after",
        read(device, 0, count)
    );
    let times = guest.check(&script, STEP).unwrap();
    let times: Vec<f64> = { times.split_whitespace() }
        .map(|time| time.parse().unwrap())
        .collect();
    times[1] - times[0]
}

#[test]
fn a_guest_sees_what_filters_do() {
    let place = Place::new();
    let plain = serve(&place, "plain", &[]);
    let slow = serve(&place, "slow", &["delay"]);
    let bad = serve(&place, "bad", &["fault:error=EIO,range=8M+1M"]);
    let kept = serve(&place, "kept", &["readonly"]);
    let names = ["plain", "slow", "bad", "kept"];
    let servers = [&plain, &slow, &bad, &kept];
    let disks =
        { names.iter().zip(servers) }.map(|(name, server)| Disk::vhost_user(name, server.socket()));
    let machine = Machine {
        disks: disks.collect(),
        ..Machine::default()
    };
    let mut guest = Guest::boot(&machine).unwrap();
    let devices = names.map(|name| guest.device(name).unwrap());

    // Each of three reads takes 2 s longer before it reaches the disk. Without the delay, no read
    // takes that long, however busy the machine is.
    set(&slow, "delay", "read=2s");
    let quick = seconds(&mut guest, &devices[0], 3);
    let slowed = seconds(&mut guest, &devices[1], 3);
    assert!(slowed >= 6.0 && quick < 4.0, "{quick} {slowed}");
    set(&slow, "delay", "read=");
    let again = seconds(&mut guest, &devices[1], 3);
    assert!(again < 4.0, "{again} {slowed}");
    assert!(mean(&slow, "queue") > 3.0 * mean(&slow, "device"));

    // Only reads in the range return errors, also to the kernel.
    let end = 64 * 256;
    for (skip, count) in [(0, 8 * 256), (9 * 256, end - 9 * 256)] {
        let command = read(&devices[2], skip, count);
        guest.check(&command, STEP).unwrap();
    }
    for skip in [8 * 256, 9 * 256 - 1] {
        let output = guest.run(&read(&devices[2], skip, 1), STEP).unwrap();
        assert_ne!(output.status, 0, "{output:?}");
    }
    let name = devices[2].trim_start_matches("/dev/").to_owned();
    let log = guest.check("dmesg", STEP).unwrap();
    let errors: Vec<_> = { log.lines() }
        .filter(|line| line.contains("I/O error"))
        .collect();
    assert!(errors.len() >= 2, "{log}");
    for error in errors {
        let sector = error.split("sector ").nth(1).unwrap();
        let sector: u64 = sector.split([' ', ',']).next().unwrap().parse().unwrap();
        assert!(error.contains(&name), "{error}");
        assert!((16384..18432).contains(&sector), "{error}");
    }

    let name = devices[3].trim_start_matches("/dev/").to_owned();
    let read_only = guest.check(&format!("cat /sys/block/{name}/ro"), STEP);
    assert_eq!(read_only.unwrap().trim(), "1");
    guest.power_off().unwrap();
}

/// A disk whose requests are stuck.
struct Stuck {
    name: &'static str,
    filters: &'static [&'static str],
    /// The filter whose option makes requests stick once the guest runs, and frees them later.
    filter: &'static str,
    sets: &'static str,
    undoes: &'static str,
}

const STUCK: &[Stuck] = &[
    Stuck {
        name: "delay",
        filters: &["delay"],
        filter: "delay",
        sets: "read=1000s",
        undoes: "read=",
    },
    Stuck {
        name: "throttle",
        filters: &["throttle"],
        filter: "throttle",
        sets: "bps-total=1",
        undoes: "bps-total=",
    },
    Stuck {
        name: "hang",
        filters: &["fault"],
        filter: "fault",
        sets: "hang=yes",
        undoes: "hang=no",
    },
    Stuck {
        name: "pause",
        filters: &["pause"],
        filter: "pause",
        sets: "frozen=yes",
        undoes: "frozen=no",
    },
    Stuck {
        name: "stack",
        filters: &[
            "log:file=/dev/null",
            "readahead:after=0",
            "delay",
            "fault:writes=torn",
            "delay",
        ],
        filter: "delay#2",
        sets: "read=1000s",
        undoes: "read=",
    },
];

#[test]
fn no_filter_holds_back_a_stop() {
    let place = Place::new();
    let servers: Vec<_> = { STUCK.iter() }
        .map(|stuck| serve(&place, stuck.name, stuck.filters))
        .collect();
    let disks = { STUCK.iter().zip(&servers) }
        .map(|(stuck, server)| Disk::vhost_user(stuck.name, server.socket()));
    let machine = Machine {
        disks: disks.collect(),
        ..Machine::default()
    };
    let mut guest = Guest::boot(&machine).unwrap();
    let devices: Vec<_> = { STUCK.iter() }
        .map(|stuck| guest.device(stuck.name).unwrap())
        .collect();
    for (stuck, server) in STUCK.iter().zip(&servers) {
        set(server, stuck.filter, stuck.sets);
    }
    for (stuck, device) in STUCK.iter().zip(&devices) {
        let name = stuck.name;
        let script = format!(
            "({} && echo 0 >/tmp/{name}.status || echo 1 >/tmp/{name}.status) 2>/dev/null &",
            // The kernel has read nothing there, so nothing was read ahead.
            read(device, 8000, 4)
        );
        guest.check(&script, STEP).unwrap();
    }
    guest.check("sleep 1", STEP).unwrap();
    let ended = guest.check("ls /tmp/*.status 2>/dev/null | wc -l", STEP);
    assert_eq!(ended.unwrap().trim(), "0", "all of them are stuck");

    // Fails if QEMU does not reply within a minute.
    guest.qmp("stop", json!({})).unwrap();

    // The same holds for a disk that opens slowly, when the guest resumes.
    set(&servers[0], "delay", "open=1000s");
    guest.qmp("cont", json!({})).unwrap();
    guest.qmp("stop", json!({})).unwrap();
    set(&servers[0], "delay", "open=");

    // No request is lost: all resume, except for those of the filter that makes requests hang and
    // fail.
    for (stuck, server) in STUCK.iter().zip(&servers) {
        set(server, stuck.filter, stuck.undoes);
    }
    guest.qmp("cont", json!({})).unwrap();
    for stuck in STUCK {
        let name = stuck.name;
        let script = format!(
            "for i in $(seq 600); do [ -e /tmp/{name}.status ] && break; sleep 0.1; done
             cat /tmp/{name}.status"
        );
        let status = guest.check(&script, STEP).unwrap();
        let expected = if name == "hang" { "1" } else { "0" };
        assert_eq!(status.trim(), expected, "{name}");
    }
    guest.power_off().unwrap();
    for server in servers {
        server.stop().unwrap();
    }
}

/// The guest's changes are in the overlay, which is removed when the server ends.
#[test]
fn an_image_under_an_overlay_stays_as_it_is() {
    let place = Place::new();
    let image = place.image("image", 64 << 20);
    let overlays = place.path("overlays");
    std::fs::create_dir(&overlays).unwrap();
    let before = checksum(&image);
    let filter = format!("cow:dir={}", overlays.display());
    let args = ["--json", "--filter", &filter];
    let server = place.serve("cow", &image, &args);
    let machine = Machine {
        disks: vec![Disk::vhost_user("cow", server.socket())],
        ..Machine::default()
    };
    let mut guest = Guest::boot(&machine).unwrap();
    let device = guest.device("cow").unwrap();
    let script = format!(
        "mkfs.ext4 -q -F {device}
         mkdir -p /mnt
         mount -t ext4 {device} /mnt
         dd if=/dev/urandom of=/mnt/file bs=64k count=64 2>/dev/null
         sync
         sha256sum /mnt/file >/tmp/sum
         echo 3 >/proc/sys/vm/drop_caches
         sha256sum -c /tmp/sum"
    );
    guest.check(&script, STEP).unwrap();
    guest.qmp("stop", json!({})).unwrap();
    guest.qmp("cont", json!({})).unwrap();
    guest
        .check(
            "echo 3 >/proc/sys/vm/drop_caches; sha256sum -c /tmp/sum && umount /mnt",
            STEP,
        )
        .unwrap();
    guest.power_off().unwrap();
    server.stop().unwrap();
    assert_eq!(checksum(&image), before);
    let left = std::fs::read_dir(overlays).unwrap().count();
    assert_eq!(left, 0);
}

fn checksum(path: &Path) -> String {
    fathom_lab::run("sha256sum", &[&path.to_string_lossy()]).unwrap()
}

/// After a power cut, a file system is sound and has all flushed data. Data that was not flushed is
/// lost.
#[test]
fn a_file_system_survives_a_power_cut() {
    let place = Place::new();
    let names = ["lost", "torn", "bare"];
    let servers = names.map(|name| {
        let writes = if name == "torn" { "torn" } else { "lost" };
        serve(&place, name, &[&format!("fault:writes={writes}")])
    });
    let disks = { names.iter().zip(&servers) }
        .map(|(name, server)| Disk::vhost_user(name, server.socket()));
    let machine = Machine {
        disks: disks.collect(),
        ..Machine::default()
    };
    let mut guest = Guest::boot(&machine).unwrap();
    for name in ["lost", "torn"] {
        let device = guest.device(name).unwrap();
        let script = format!(
            "mkfs.ext4 -q -F {device} 32M
             mkdir -p /mnt/{name}
             mount -t ext4 {device} /mnt/{name}
             cd /mnt/{name}
             for i in $(seq 20); do echo flushed $i >$i; done
             sync
             dd if=/dev/zero of=large bs=64k count=16 2>/dev/null"
        );
        guest.check(&script, STEP).unwrap();
    }
    // This disk is not flushed.
    let bare = guest.device("bare").unwrap();
    let block = format!("dd if={bare} bs=4k count=1 iflag=direct 2>/dev/null | grep -c unflushed");
    let write = format!(
        "echo unflushed >/tmp/block
         dd if=/tmp/block of={bare} bs=4k count=1 conv=sync oflag=direct 2>/dev/null
         {block}"
    );
    assert_eq!(guest.check(&write, STEP).unwrap().trim(), "1");
    guest.qmp("stop", json!({})).unwrap();
    for server in &servers {
        set(server, "fault", "power-cut=yes");
    }
    let from = guest.console().position();
    guest.qmp("system_reset", json!({})).unwrap();
    guest.qmp("cont", json!({})).unwrap();
    guest.wait_ready(from).unwrap();
    for name in ["lost", "torn"] {
        let device = guest.device(name).unwrap();
        let script = format!(
            "mkdir -p /mnt/{name}
             mount -t ext4 {device} /mnt/{name}
             cd /mnt/{name}
             for i in $(seq 20); do [ \"$(cat $i)\" = \"flushed $i\" ] || exit 1; done
             cd /
             umount /mnt/{name}"
        );
        guest.check(&script, STEP).unwrap();
    }
    assert_eq!(guest.run(&block, STEP).unwrap().text.trim(), "0");
    guest.power_off().unwrap();
}
