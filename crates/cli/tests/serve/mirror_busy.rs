//! Checks mirrors whose target or users do not respond when the mirror starts or is stopped.

use crate::driver::with_disk;
use crate::mirror::{mirror, start};
use crate::support::nbd::Nbd;
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, listens, refused, run, short_dir, stdout_of,
};
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;

#[test]
fn stop_leaves_a_ready_mirror_when_users_cannot_be_held() {
    let dir = short_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    // Writes to this disk take longer than the server waits for requests in flight.
    let mut slow = Command::new("nbdkit");
    slow.args(["-f", "-U", &path("k"), "--filter=delay", "memory", "4M"]);
    let _slow = Kept::spawn(slow.arg("wdelay=20"));
    eventually("nbdkit", || listens(&dir.path().join("k")).then_some(()));
    let served = Nbd::start(&format!("nbd+unix:///?socket={}", path("k")), &[]);
    start(&served, &path("t"), &["--wait"]);
    let mut writer = fathom();
    writer.args(["bench", "--nbd", &served.uri(), "--rw", "write"]);
    let mut writer = Kept::spawn(writer.args(["--number-ios", "1"]));
    eventually("a request is in flight", || {
        let stats = stdout_of(&["stats", &served.api(), "--json"]);
        let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
        (stats["in_flight"] != 0).then_some(())
    });
    let words = ["retry", "--force"];
    refused(1, &["mirror", "stop", &served.api()], &words);
    assert_eq!(mirror(&served)["phase"], "ready");
    assert!(writer.0.wait().unwrap().success());
    // The mirror is not ready while it copies what was written.
    let told = eventually("it stops", || {
        let output = run(&["mirror", "stop", &served.api()]);
        let is_done = output.status.success();
        is_done.then(|| String::from_utf8(output.stdout).unwrap())
    });
    assert!(told.starts_with("done: to "), "{told}");
}

/// Returns whether a mirror of the disk is being started.
fn is_starting(served: &Served) -> bool {
    // This command changes nothing. The server refuses the command while a change of the disk is in
    // progress.
    let output = run(&["set", &served.api(), "pause", "frozen=no"]);
    String::from_utf8_lossy(&output.stderr).contains("being changed")
}

#[test]
fn front_end_leaves_while_a_mirror_waits_for_its_target() {
    let dir = disk_dir();
    let (image, target) = (as_arg(&dir.path().join("i")), as_arg(&dir.path().join("t")));
    for path in [&image, &target] {
        fs::write(path, vec![0; 4 << 20]).unwrap();
    }
    // Another process has locked the target. The server waits some seconds for the lock.
    let mut other = Command::new("qemu-io");
    other.args(["-f", "raw", &target]).stdin(Stdio::piped());
    let mut other = Kept(other.stdout(Stdio::piped()).spawn().unwrap());
    // qemu-io prints its prompt after it has locked the image.
    let mut prompt = [0; 8];
    other
        .0
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut prompt)
        .unwrap();
    let served = Served::start(&image, &["--filter", "pause"]);
    // On a busy machine, the server may stop waiting too early for this test.
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
