//! Checks the memory that `fathom serve` takes: guest memory that it pins, and metadata that it
//! caches.

use crate::support::{Served, as_arg, disk_dir, eventually, fathom};
use std::process::Stdio;

/// Returns a value of /proc/PID/status in KiB.
fn status(served: &Served, name: &str) -> u64 {
    let path = format!("/proc/{}/status", served.child.id());
    let status = std::fs::read_to_string(path).expect("its status");
    let line = status.lines().find(|line| line.starts_with(name));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse().ok()).expect("a number")
}

/// Returns the memory that the process has pinned, in KiB.
fn pinned(served: &Served) -> u64 {
    status(served, "VmPin:")
}

/// Large requests have several segments, small ones have one; all of them are verified. The memory
/// is unpinned when the front-end disconnects.
#[test]
fn pinned_memory_gets_the_right_bytes_of_requests() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    for extra in [&["--iothreads", "2"][..], &["--cache", "writeback"]] {
        let args = [&["--register-memory"], extra].concat();
        let mut served = Served::start(&as_arg(&image), &args);
        for (bs, requests) in [("4k", 5000), ("256k", 500)] {
            let load = ["--rw", "randrw", "--bs", bs, "--iodepth", "32"];
            let load = [&load[..], &["--queues", "2", "--verify"]].concat();
            served.load(requests, &load);
            // This front-end stays connected until the test has seen the pinned memory.
            let mut front_end = fathom()
                .args(["bench", "--vhost-user", &served.arg("s")])
                .args(["--runtime", "10m"])
                .args(load)
                .stdout(Stdio::null())
                .spawn()
                .expect("fathom starts");
            eventually("pinned memory", || (pinned(&served) > 1024).then_some(()));
            front_end.kill().expect("it was there");
            front_end.wait().expect("a child");
            eventually("memory given back", || (pinned(&served) == 0).then_some(()));
        }
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert!(!served.log().contains("WARN"), "{}", served.log());
    }
}

#[test]
fn an_engine_that_cannot_register_memory_says_so_and_serves() {
    let mut served = Served::start("null:1G", &["--register-memory", "--aio", "threads"]);
    served.wait_for("--register-memory: no effect");
    served.load(1000, &["--rw", "randread"]);
    assert_eq!(served.terminate().0, Some(0));
}

/// Returns the largest resident memory of the process so far, in KiB.
fn peak(served: &Served) -> u64 {
    status(served, "VmHWM:")
}

/// Reads all over a disk of 1 TiB, whose L2 tables take 128 MiB.
#[test]
fn the_metadata_cache_bounds_what_a_large_image_takes() {
    let dir = disk_dir();
    let image = dir.path().join("large.qcow2");
    let made = std::process::Command::new("qemu-img")
        .args([
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "preallocation=metadata",
        ])
        .arg(&image)
        .arg("1T")
        .status();
    assert!(made.expect("qemu-img is installed").success());
    let options = ["--format", "qcow2", "--metadata-cache", "4M"];
    let mut served = Served::start(&as_arg(&image), &options);
    served.load(30_000, &["--rw", "randread", "--iodepth", "32"]);
    let most = (4 + 32) << 10;
    let peak = peak(&served);
    assert!(peak < most, "{peak} KiB were resident");
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
}
