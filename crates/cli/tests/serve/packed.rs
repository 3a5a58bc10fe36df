//! Tests packed virtqueues from the option of the server to verified data.

use crate::support::{Served, as_arg, disk_dir, run, stdout_of};

/// Each kind of chain, of notification and of tracking.
const LOADS: [&[&str]; 6] = [
    &["--iodepth", "32"],
    &["--iodepth", "1"],
    &["--iodepth", "32", "--queues", "2", "--inflight", "--log"],
    &[
        "--iodepth",
        "64",
        "--no-event-idx",
        "--queue-size",
        "100",
        "--fsync",
        "7",
    ],
    &[
        "--iodepth",
        "20",
        "--no-indirect",
        "--segment-size",
        "1k",
        "--queue-size",
        "131",
    ],
    &[
        "--iodepth",
        "16",
        "--no-indirect",
        "--wait",
        "poll",
        "--inflight",
    ],
];

#[test]
fn packed_queues_move_the_right_bytes() {
    let served = Served::start("memory:64M", &["--packed"]);
    for load in LOADS {
        let packed = ["--packed", "on", "--rw", "randrw", "--verify"];
        served.load(3000, &[&packed, load].concat());
    }
    // The driver chooses the layout.
    served.load(3000, &["--rw", "randrw", "--verify"]);
    let info = stdout_of(&["bench", "--vhost-user", &served.arg("s"), "--info"]);
    assert!(info.contains("RING_PACKED"), "{info}");
}

#[test]
fn packed_queues_must_be_offered() {
    let served = Served::start("null:1G", &[]);
    let refused = run(&["bench", "--vhost-user", &served.arg("s"), "--packed", "on"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success());
    assert!(error.contains("serve the disk with --packed"), "{error}");
}

#[test]
fn packed_queues_go_on_in_the_successor() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(16 << 20).unwrap();
    let served = Served::start(&as_arg(&image), &["--packed"]);
    let load = [
        "--packed",
        "on",
        "--rw",
        "randrw",
        "--iodepth",
        "16",
        "--verify",
    ];
    let mut load = served.start_load(100_000, &load);
    for _ in 0..3 {
        served.upgrade();
    }
    assert!(load.wait().unwrap().success());
}
