//! `fathom serve --register-memory`: guest memory that the kernel has pinned.

mod support;

use std::process::Stdio;
use support::{Served, as_arg, disk_dir, eventually, fathom};

/// KiB that the process has pinned.
fn pinned(served: &Served) -> u64 {
    let path = format!("/proc/{}/status", served.child.id());
    let status = std::fs::read_to_string(path).expect("its status");
    let line = status.lines().find(|line| line.starts_with("VmPin:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse().ok()).expect("VmPin")
}

/// Large requests have several segments, small ones have one; all of them are
/// checked. The memory is given back when the front-end goes.
#[test]
fn memory_is_pinned_for_its_front_end_and_requests_reach_the_right_bytes() {
    let dir = disk_dir();
    let image = dir.path().join("disk.img");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    for extra in [&["--iothreads", "2"][..], &["--cache", "writeback"]] {
        let args = [&["--register-memory"], extra].concat();
        let mut served = Served::start(&as_arg(&image), &args);
        for bs in ["4k", "256k"] {
            let socket = served.arg("s");
            let bench = fathom()
                .args([
                    "bench",
                    "--vhost-user",
                    &socket,
                    "--rw",
                    "randrw",
                    "--bs",
                    bs,
                ])
                .args([
                    "--iodepth",
                    "32",
                    "--queues",
                    "2",
                    "--verify",
                    "--runtime",
                    "1s",
                ])
                .stdout(Stdio::null())
                .spawn();
            let mut bench = bench.expect("fathom starts");
            eventually("pinned memory", || (pinned(&served) > 1024).then_some(()));
            assert!(bench.wait().expect("a child").success(), "{}", served.log());
            eventually("memory given back", || (pinned(&served) == 0).then_some(()));
        }
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert!(!served.log().contains("WARN"), "{}", served.log());
    }
}

#[test]
fn an_engine_that_cannot_register_memory_says_so_and_serves() {
    let mut served = Served::start("null:1G", &["--register-memory", "--aio", "threads"]);
    served.wait_for("--register-memory has no effect");
    served.load(1000, &["--rw", "randread"]);
    assert_eq!(served.terminate().0, Some(0));
}
