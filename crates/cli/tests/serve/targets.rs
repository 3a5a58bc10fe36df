//! Checks targets of mirrors that die, hang, or are not suitable.

use crate::driver::{Request, with_disk};
use crate::kinds::qemu_img;
use crate::mirror::{await_phase, mirror, start};
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, refused, short_dir, stdout_of};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::slice;
use std::time::{Duration, Instant};

/// A target of 64 MiB on an NBD server.
struct Remote {
    _dir: tempfile::TempDir,
    server: Kept,
    uri: String,
}

impl Remote {
    fn start() -> Remote {
        let dir = short_dir();
        let (image, socket) = (as_arg(&dir.path().join("t")), as_arg(&dir.path().join("n")));
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let mut server = Command::new("qemu-nbd");
        server.args(["-t", "-f", "raw", "-k", &socket, "-e", "8", &image]);
        let server = Kept::spawn(&mut server);
        eventually("its socket", || Path::new(&socket).exists().then_some(()));
        let uri = format!("nbd+unix:///?socket={socket}");
        Remote {
            _dir: dir,
            server,
            uri,
        }
    }
}

#[test]
fn a_target_that_dies_or_hangs_keeps_nobody_from_anything() {
    for signal in ["KILL", "STOP"] {
        for active in [&[][..], &["--active"]] {
            let remote = Remote::start();
            let dir = disk_dir();
            let image = as_arg(&dir.path().join("i"));
            fs::write(&image, vec![3; 64 << 20]).unwrap();
            let served = Served::start(&image, &[]);
            let socket = served.arg("s");
            let write = Request::Write {
                offset: 0,
                data: vec![1; 4096],
            };
            let since = with_disk(&socket, 1, |disk| {
                start(&served, &remote.uri, &[&["--wait"], active].concat());
                disk.all(&vec![write.clone(); 100]);
                await_phase(&served, "ready");
                remote.server.signal(signal);
                // (More data than the mirror may have left to copy.)
                for n in 0..1024u64 {
                    let data = vec![n as u8; 64 << 10];
                    let offset = n * (64 << 10);
                    let answers = disk.all(&[Request::Write { offset, data }]);
                    assert_eq!(answers, [Ok(Vec::new())]);
                }
                Instant::now()
            });
            // The mirror releases the disk as soon as its virtual machine has disconnected.
            with_disk(&socket, 1, |disk| {
                assert_eq!(disk.all(slice::from_ref(&write)), [Ok(Vec::new())]);
            });
            assert!(
                since.elapsed() < Duration::from_secs(15),
                "{:?}",
                since.elapsed()
            );
            await_phase(&served, "failed");
            refused(
                1,
                &["mirror", "complete", &served.api(), "--transient"],
                &["has failed"],
            );
        }
    }
}

#[test]
fn what_cannot_be_a_target_is_refused() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (image, small, other) = (path("i"), path("small"), path("other"));
    fs::write(&image, vec![7; 4 << 20]).unwrap();
    fs::write(&small, vec![7; 1 << 20]).unwrap();
    fs::write(&other, vec![7; 4 << 20]).unwrap();
    let served = Served::start(&image, &[]);
    let used = Served::start(&other, &[]);
    let api = served.api();
    let fails = |target: &str, more: &[&str], why: &[&str]| {
        refused(1, &[&["mirror", "start", &api, target], more].concat(), why);
    };
    fails(&small, &[], &["1 MiB", "4 MiB", "the same size"]);
    fails(&image, &[], &["in use by"]);
    with_disk(&used.arg("s"), 1, |_| {
        fails(&other, &[], &["in use by fathom"])
    });
    fails(&small, &["-O", "qcow2"], &["qcow2"]);
    fails(&path("no/t"), &[], &["no such"]);
    fails(
        &path("t"),
        &["-o", "size=1M", "-O", "qcow2"],
        &["leave size"],
    );
    fails(&other, &["-o", "preallocation=off"], &["exists already"]);
    fails("null:1M", &[], &["the same size"]);
    // Front-ends of the disk use blocks of 512 bytes.
    let socket = path("n");
    let mut coarse = Command::new("nbdkit");
    coarse.args(["-f", "-U", &socket, "--filter=blocksize-policy"]);
    coarse.args([
        "memory",
        "4M",
        "blocksize-minimum=4k",
        "blocksize-error-policy=error",
    ]);
    let _coarse = Kept::spawn(&mut coarse);
    eventually("its socket", || Path::new(&socket).exists().then_some(()));
    let coarse = format!("nbd+unix:///?socket={socket}");
    fails(&coarse, &[], &["blocks of 4096 bytes"]);
    assert!(!Path::new(&path("t")).exists());
    refused(1, &["mirror", "show", &api], &["no mirror"]);
    refused(1, &["mirror", "complete", &api], &["no mirror"]);
    qemu_img(
        dir.path(),
        &["create", "-q", "-f", "qcow2", &path("q"), "4M"],
    );
    fails(&path("q"), &[], &["qcow2"]);
    // Only one operation at a time is possible.
    let target = path("t");
    start(&served, &target, &["--wait"]);
    fails(&path("u"), &[], &["a mirror is in progress"]);
    assert!(!Path::new(&path("u")).exists(), "it is not left behind");
    refused(1, &["backup", "start", &api], &["a mirror is in progress"]);
    refused(1, &["resize", &api, "8M"], &["a mirror is in progress"]);
    refused(1, &["upgrade", &api], &["a mirror is in progress"]);
    refused(1, &["disk", "remove", &api], &["in use by a mirror"]);
    refused(
        1,
        &["mirror", "complete", &api],
        &["on the server's command line", "--transient"],
    );
    assert_eq!(mirror(&served)["phase"], "ready");
    stdout_of(&["mirror", "stop", &api]);
    assert!(fs::read(&target).unwrap() == fs::read(&image).unwrap());
    stdout_of(&["backup", "start", &api]);
    fails(&target, &[], &["a backup is in progress"]);
    stdout_of(&["backup", "stop", &api]);
    let shared = Served::start(&image, &["--readonly", "--force-share"]);
    let args = ["mirror", "start", &shared.api(), &target];
    refused(1, &args, &["other processes may change the image"]);
    let served = Served::start(&image, &["--filter", "cow"]);
    refused(1, &["mirror", "start", &served.api(), &target], &["cow"]);
}
