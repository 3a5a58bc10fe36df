//! Checks internal snapshots that are taken while the disk is in use.

use crate::driver::with_disk;
use crate::exercise::{KillRounds, Random, differ, exercise};
use crate::keep;
use crate::kinds::{Kind, qemu_img, qemu_io};
use crate::mirror::{
    after_a_kill, check, check_killed, flat, served_uri, start, there, write_in_order, written,
};
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, short_dir, stdout_of,
};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

fn take(served: &Served, name: &str) {
    stdout_of(&["snapshot", &served.api(), "--internal", name]);
}

fn names(served: &Served) -> Vec<String> {
    let all = stdout_of(&["snapshot", &served.api(), "--list", "--json"]);
    let all: Vec<Value> = serde_json::from_str(&all).unwrap();
    let name = |one: &Value| one["name"].as_str().unwrap().to_owned();
    all.iter().map(name).collect()
}

/// Returns the contents of a snapshot, as QEMU reads them.
fn kept(dir: &Path, image: &str, name: &str) -> Vec<u8> {
    let flat = as_arg(&dir.join("kept"));
    let which = format!("snapshot.name={name}");
    let convert = ["convert", "-U", "-f", "qcow2", "-O", "raw", "-l", &which];
    qemu_img(dir, &[&convert[..], &[image, &flat]].concat());
    fs::read(flat).unwrap()
}

#[test]
fn every_kind_of_qcow2_image_keeps_the_disk_as_it_was() {
    let kinds = Kind::all().step_by(2);
    let kinds = kinds.filter(|kind| kind.format == "qcow2" && !kind.has("data_file"));
    for kind in kinds {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let before = kind.snapshot(dir);
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(2000 + kind.number);
        let image = as_arg(&dir.join("i"));
        let mut served = Served::start(&image, &kind.serve_args());
        if kind.has("refcount_bits=1") {
            let args = ["snapshot", &served.api(), "--internal", "a"];
            with_disk(&served.arg("s"), 1, |disk| {
                exercise(disk, &mut model, &mut random);
                refused(1, &args, &["larger refcount_bits"]);
                assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            });
            continue;
        }
        let mut then = Vec::new();
        // A refcount of two bits is at most three.
        let rounds = if kind.has("refcount_bits=2") { 1 } else { 3 };
        with_disk(&served.arg("s"), 2, |disk| {
            for n in 0..rounds {
                exercise(disk, &mut model, &mut random);
                then.push(model.clone());
                take(&served, &format!("s{n}"));
                exercise(disk, &mut model, &mut random);
            }
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            // The guest changes the disk while snapshots are deleted and taken.
            thread::scope(|scope| {
                let taken = scope.spawn(|| {
                    stdout_of(&["snapshot", &served.api(), "--delete", "s0"]);
                    take(&served, "last");
                });
                while !taken.is_finished() {
                    exercise(disk, &mut model, &mut random);
                }
                taken.join().unwrap();
            });
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            let found = names(&served);
            assert!(found.contains(&"last".to_owned()) && !found.contains(&"s0".to_owned()));
        });
        assert!(!served.log().contains("WARN"), "{}", served.log());
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        check(dir, "qcow2", &image);
        assert_eq!(differ(&flat(dir, "qcow2", &image), &model), None);
        for (n, then) in then.iter().enumerate().skip(1) {
            let kept = kept(dir, &image, &format!("s{n}"));
            assert_eq!(differ(&kept, then), None, "{kind:?} {n}");
        }
        assert!(kind.snapshot(dir) == before, "its first one has changed");
        // Reverts the image to a snapshot.
        if rounds > 1 {
            stdout_of(&["img", "snapshot", "-a", "s1", &image]);
            assert_eq!(differ(&flat(dir, "qcow2", &image), &then[1]), None);
        }
    }
}

#[test]
fn whenever_the_server_is_killed_the_image_is_sound() {
    let dir = disk_dir();
    let dir = dir.path();
    let mut random = Random::new(23);
    let mut served = keep::start(short_dir(), "");
    let mut rounds = KillRounds::new();
    while let Some(round) = rounds.next() {
        let (image, log) = (as_arg(&dir.join(format!("i{round}"))), dir.join("written"));
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"];
        qemu_img(dir, &[&create[..], &[&image, "4M"]].concat());
        qemu_io(dir, &image, "qcow2", &["write -P 251 0 4M"]);
        let api = served.api();
        let add = ["disk", "add", "--server", &api, "d", &image];
        stdout_of(&[&add[..], &["--format", "qcow2"]].concat());
        let load = write_in_order(&served_uri(&served), &log);
        eventually("writes", || (written(&log) > 20).then_some(()));
        let mut takes = fathom();
        takes.args(["snapshot", &api, "--internal", "then"]);
        let takes = Kept::spawn(takes.stderr(Stdio::null()));
        thread::sleep(rounds.pause(&mut random, Duration::from_millis(60)));
        served = keep::again(served, "KILL", "");
        drop(takes);
        drop(load);
        let contents = after_a_kill(&served, &log, 251);
        let is_there = names(&served) == ["then"];
        rounds.note(is_there);
        let api = served.api();
        stdout_of(&["disk", "remove", &api, "--disk", "d", "--force"]);
        check_killed(dir, "qcow2", &image);
        assert!(flat(dir, "qcow2", &image) == contents, "round {round}");
        if is_there {
            // The snapshot has all writes that it must have, and nothing behind the last one.
            let kept = kept(dir, &image, "then");
            let found = there(&kept);
            assert!(found >= 20, "{found}");
            let rest = &kept[(found + 1) * 512..];
            assert!(rest.iter().all(|byte| *byte == 251), "behind {found}");
        }
    }
}

#[test]
fn bitmaps_and_clients_know_of_nothing() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", &image, "64M"]);
    qemu_io(dir.path(), &image, "qcow2", &["write -P 1 0 8M"]);
    let served = keep::start(short_dir(), "");
    let api = served.api();
    let add = ["disk", "add", "--server", &api, "d", &image];
    stdout_of(&[&add[..], &["--format", "qcow2"]].concat());
    // No client uses the disk.
    take(&served, "first");
    stdout_of(&["bitmap", "add", &api, "b", "--granularity", "64k"]);
    let log = dir.path().join("written");
    let load = write_in_order(&served_uri(&served), &log);
    for n in 0..3 {
        let before = written(&log);
        eventually("more", || (written(&log) > before + 50).then_some(()));
        take(&served, &format!("s{n}"));
    }
    let before = written(&log);
    eventually("more", || (written(&log) > before + 50).then_some(()));
    drop(load);
    let bitmap = stdout_of(&["bitmap", "list", &api]);
    // The number of blocks that `written` consecutive writes of one sector have reached.
    let blocks = 1..=written(&log) / 128 + 2;
    let mut told = blocks.map(|n| format!("b: {} KiB changed, ", n * 64));
    assert!(told.any(|told| bitmap.starts_with(&told)), "{bitmap}");
    assert_eq!(names(&served), ["first", "s0", "s1", "s2"]);
    let list = stdout_of(&["snapshot", &api, "--list"]);
    assert!(list.starts_with("1: first, taken 20"), "{list}");
    stdout_of(&["snapshot", &api, "--delete", "2"]);
    assert_eq!(names(&served), ["first", "s1", "s2"]);
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (image, raw) = (path("i"), path("raw"));
    qemu_img(dir.path(), &["create", "-q", "-f", "raw", &raw, "4M"]);
    let create = ["create", "-q", "-f", "qcow2", "-b", &raw, "-F", "raw"];
    qemu_img(dir.path(), &[&create[..], &[&image]].concat());
    let refuses = |disk: &str, args: &[&str], why: &[&str]| {
        let served = Served::start(disk, args);
        refused(1, &["snapshot", &served.api(), "--internal", "a"], why);
    };
    refuses(&raw, &[], &["only qcow2"]);
    refuses("memory:1M", &[], &["only qcow2"]);
    refuses(&image, &["--format", "qcow2", "--readonly"], &["read-only"]);
    let served = Served::start(&image, &["--format", "qcow2"]);
    let api = served.api();
    let fails = |args: &[&str], why: &[&str]| {
        refused(1, &[&["snapshot", &api], args].concat(), why);
    };
    with_disk(&served.arg("s"), 1, |disk| {
        take(&served, "a");
        fails(
            &["--internal", "a"],
            &["a snapshot named 'a' already exists"],
        );
        fails(&["--internal", &"x".repeat(256)], &["255 bytes"]);
        fails(&["--delete", "b"], &["'b'"]);
        assert!(disk.contents().iter().all(|byte| *byte == 0));
        start(&served, &path("target"), &["--wait"]);
        fails(&["--internal", "b"], &["a mirror is in progress"]);
        assert_eq!(names(&served), ["a"]);
        stdout_of(&["mirror", "stop", &api, "--force"]);
        // From now on, the snapshot needs the backing image.
        refused(1, &["stream", "start", &api], &["1 internal snapshots"]);
    });
    refused(2, &["snapshot", &api], &["FILE", "--internal"]);
    refused(
        2,
        &["snapshot", &api, "--list", "--transient"],
        &["--transient"],
    );
}

/// A killed server may have left requests with a front-end. These requests must reach the image
/// before a snapshot.
#[test]
fn what_a_front_end_may_know_comes_first() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", &image, "4M"]);
    let served = Served::start(&image, &["--format", "qcow2"]);
    let args = ["snapshot", &served.api(), "--internal", "a"];
    refused(1, &args, &["has not connected yet"]);
    with_disk(&served.arg("s"), 1, |_| take(&served, "a"));
    // The front-end has connected before, and all its writes are in the image.
    take(&served, "b");
    take(&served, "c");
    assert_eq!(names(&served), ["a", "b", "c"]);
    let served = Served::start(&image, &["--format", "qcow2", "--filter", "cow"]);
    for what in ["--list", "--internal=d"] {
        refused(
            1,
            &["snapshot", &served.api(), what],
            &["without --filter cow"],
        );
    }
}

/// The snapshot needs the backing image, even if another program has taken it.
#[test]
fn snapshots_that_nobody_has_seen_come_are_kept() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, image) = (path("base"), path("i"));
    qemu_img(dir.path(), &["create", "-q", "-f", "raw", &base, "4M"]);
    let create = ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw"];
    qemu_img(dir.path(), &[&create[..], &[&image]].concat());
    let served = keep::start(short_dir(), "");
    let api = served.api();
    let add = ["disk", "add", "--server", &api, "d", &image];
    stdout_of(&[&add[..], &["--format", "qcow2"]].concat());
    // No client uses the disk.
    for taken in [true, false] {
        match taken {
            true => take(&served, "one"),
            false => drop(qemu_img(dir.path(), &["snapshot", "-c", "one", &image])),
        }
        for args in [&["stream", "start", &api][..], &["commit", &api, &base]] {
            refused(1, args, &["1 internal snapshots"]);
        }
        eventually("the snapshot is deleted", || {
            let done = fathom()
                .args(["snapshot", &api, "--delete", "one"])
                .output();
            done.unwrap().status.success().then_some(())
        });
    }
}
