//! Checks with strace(1) that data that must be durable reaches the kernel as such. The server uses
//! its thread pool, whose system calls strace can see.

use crate::support::{Served, as_arg, disk_dir, eventually, fathom, short_dir, stdout_of};
use std::process::{Command, Stdio};

/// Serves a file, writes to it with `load`, and stops the server. Returns the writes and flushes
/// that the kernel saw, in order.
fn calls(cache: &str, load: &[&str]) -> Vec<String> {
    let (dir, reports) = (disk_dir(), short_dir());
    let image = dir.path().join("disk.img");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let report = as_arg(&reports.path().join("report"));
    let program = fathom();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-e", "trace=pwritev2,pwrite64,fdatasync,fsync"]);
    strace.args(["-e", "signal=none", "-y", "-s", "0", "-o", &report]);
    strace.arg(program.get_program());
    strace.env_remove("FATHOM_LOG").env_remove("NOTIFY_SOCKET");
    let args = ["--aio", "threads", "--cache", cache, "--poll", "off"];
    let mut served = Served::start_by(strace, &as_arg(&image), &args);
    served.load(40, &[&["--rw", "write", "--bs", "4k"], load].concat());
    stdout_of(&["quit", &served.api()]);
    assert_eq!(served.end().0, Some(0), "{}", served.log());
    let report = std::fs::read_to_string(&report).unwrap();
    // A call has a second line if a call of another thread interrupts the first one.
    let begun = |line: &&str| line.contains("disk.img") && !line.contains("resumed>");
    report.lines().filter(begun).map(str::to_owned).collect()
}

fn is_sync(call: &str) -> bool {
    call.contains("sync(")
}

fn is_dsync(call: &str) -> bool {
    call.contains("RWF_DSYNC")
}

#[test]
fn each_flush_is_an_fdatasync_and_the_end_is_one() {
    for cache in ["none", "writeback"] {
        let calls = calls(cache, &["--fsync", "10"]);
        let text = calls.join("\n");
        assert!(!calls.iter().any(|call| is_dsync(call)), "{text}");
        // 40 requests: after every ten writes there is a flush. The server makes the last flush at
        // its end.
        let written: Vec<usize> = calls
            .split(|call| is_sync(call))
            .map(<[String]>::len)
            .collect();
        assert_eq!(written, [10, 10, 10, 7, 0], "{cache}:\n{text}");
    }
}

#[test]
fn unflushed_writes_are_durable_when_the_last_ring_has_stopped() {
    for cache in ["none", "writeback"] {
        let calls = calls(cache, &[]);
        let text = calls.join("\n");
        assert_eq!(
            calls.iter().filter(|call| !is_sync(call)).count(),
            40,
            "{text}"
        );
        assert!(calls.last().is_some_and(|call| is_sync(call)), "{text}");
    }
}

#[test]
fn every_write_is_durable_by_itself_without_a_cache() {
    let calls = calls("writethrough", &[]);
    let (writes, syncs): (Vec<_>, Vec<_>) = calls.iter().partition(|call| !is_sync(call));
    assert_eq!(writes.len(), 40);
    assert!(writes.iter().all(|call| is_dsync(call)), "{writes:?}");
    assert!(syncs.len() <= 2, "{syncs:?}");
}

/// This includes metadata: the image of a killed server has all acknowledged writes, although no
/// front-end repeats them.
#[test]
fn writes_without_a_cache_survive_a_killed_server() {
    for format in ["qcow2", "qed"] {
        let dir = disk_dir();
        let image = dir.path().join("disk.img");
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", format])
            .args([as_arg(&image).as_str(), "64M"])
            .status();
        assert!(made.expect("qemu-img is installed").success());
        let options = ["--format", format, "--cache", "writethrough"];
        let mut served = Served::start(&as_arg(&image), &options);
        let state = as_arg(&dir.path().join("state"));
        let verify = ["--rw", "randwrite", "--verify", "--verify-state", &state];
        let mut bench = fathom()
            .args(["bench", "--vhost-user", &served.arg("s"), "--iodepth", "8"])
            .args(verify)
            .args(["--runtime", "10m"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("fathom starts");
        eventually("some writes", || {
            let info: serde_json::Value =
                serde_json::from_str(&stdout_of(&["info", &served.api(), "--json"])).unwrap();
            (info["workers"][0]["requests"].as_u64() > Some(300)).then_some(())
        });
        served.signal("KILL");
        let _ = served.end();
        assert!(!bench.wait().expect("a child").success());
        let successor = Served::start(&as_arg(&image), &options);
        let socket = successor.arg("s");
        let again = ["bench", "--vhost-user", &socket, "--verify-only"];
        stdout_of(&[&again[..], &verify].concat());
    }
}
