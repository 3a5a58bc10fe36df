//! Mirrors whose target or users do not respond when the mirror starts or is stopped.

use crate::driver::with_disk;
use crate::mirror::{flat, mirror, start};
use crate::support::nbd::Nbd;
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, refused, run, stdout_of};
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;

#[test]
fn stop_leaves_a_ready_mirror_when_users_cannot_be_held() {
    let dir = disk_dir();
    let target = as_arg(&dir.path().join("t"));
    let image = as_arg(&dir.path().join("i"));
    fs::write(&image, vec![7; 4 << 20]).unwrap();
    let served = Nbd::start(&image, &["--filter", "pause"]);
    start(&served, &target, &["--wait"]);
    stdout_of(&["set", &served.api(), "pause", "frozen=yes"]);
    let mut reader = fathom();
    reader.args(["bench", "--nbd", &served.uri(), "--number-ios", "1"]);
    let mut reader = Kept::spawn(&mut reader);
    eventually("a request is in flight", || {
        let stats = stdout_of(&["stats", &served.api(), "--json"]);
        let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
        (stats["in_flight"] == 1).then_some(())
    });
    refused(
        1,
        &["mirror", "stop", &served.api()],
        &["try again", "--force"],
    );
    assert_eq!(mirror(&served)["phase"], "ready");
    stdout_of(&["set", &served.api(), "pause", "frozen=no"]);
    assert!(reader.0.wait().unwrap().success());
    let told = stdout_of(&["mirror", "stop", &served.api()]);
    assert!(told.starts_with("done: to "), "{told}");
    assert!(flat(dir.path(), "raw", &target) == vec![7; 4 << 20]);
}

/// Whether a mirror of the disk is being started.
fn is_starting(served: &Served) -> bool {
    let output = run(&["mirror", "stop", &served.api()]);
    String::from_utf8_lossy(&output.stderr).contains("just being changed")
}

#[test]
fn front_end_leaves_while_a_mirror_waits_for_its_target() {
    let dir = disk_dir();
    let (image, target) = (as_arg(&dir.path().join("i")), as_arg(&dir.path().join("t")));
    for path in [&image, &target] {
        fs::write(path, vec![0; 4 << 20]).unwrap();
    }
    // Another process has the target, which the server waits for, for some seconds.
    let mut other = Command::new("qemu-io");
    other.args(["-f", "raw", &target]).stdin(Stdio::piped());
    let mut other = Kept(other.stdout(Stdio::piped()).spawn().unwrap());
    // Its prompt follows its lock.
    let mut prompt = [0; 8];
    other
        .0
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut prompt)
        .unwrap();
    let served = Served::start(&image, &[]);
    // On a busy machine the wait may be over too early.
    let left = (0..5).any(|_| {
        thread::scope(|scope| {
            let api = served.api();
            let (target, served) = (&target, &served);
            let started = scope.spawn(move || run(&["mirror", "start", &api, target, "--quiet"]));
            let mut waits = false;
            while !waits && !started.is_finished() {
                waits = is_starting(served);
            }
            for _ in 0..3 {
                with_disk(&served.arg("s"), 1, |disk| assert_eq!(disk.size(), 4 << 20));
            }
            let left = waits && is_starting(served);
            assert!(!started.join().unwrap().status.success());
            left
        })
    });
    assert!(left, "the front-end has waited for the target");
}
