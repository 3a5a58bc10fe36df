//! Checks `fathom stream`, which copies the data of backing images into a disk's image while it is
//! in use.

use crate::driver::with_disk;
use crate::exercise::{KillRounds, Random, differ, exercise};
use crate::keep;
use crate::kinds::{Kind, SIZE, qemu_img, qemu_io};
use crate::mirror::{after_a_kill, check_killed, flat, served_uri, write_in_order, written};
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, short_dir, stdout_of,
};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

fn start(served: &Served, more: &[&str]) {
    stdout_of(&[&["stream", "start", &served.api(), "--quiet"], more].concat());
}

/// Waits until the disk has its former options again, after a job that has begun.
pub fn await_end(served: &Served) {
    eventually("its end", || {
        let changes = served.log().matches("disk changed: ").count();
        (changes > 0 && changes.is_multiple_of(2)).then_some(())
    });
}

/// If the image has an internal snapshot, calls `refused`, which checks that the snapshot prevents
/// the operation. Then deletes the snapshot.
pub fn without_snapshots(kind: Kind, dir: &Path, refused: impl FnOnce(&Served)) {
    if kind.snapshot(dir).is_some() {
        let image = as_arg(&dir.join("i"));
        let mut served = Served::start(&image, &kind.serve_args());
        with_disk(&served.arg("s"), 1, |_| refused(&served));
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        qemu_img(dir, &["snapshot", "-d", "first", "i"]);
    }
}

/// Returns the name of the backing image in the image's header.
pub fn below(dir: &Path, image: &str) -> Value {
    let info = qemu_img(dir, &["info", "-U", "--output", "json", image]);
    let info: Value = serde_json::from_str(&info).unwrap();
    info["backing-filename"].clone()
}

#[test]
fn every_kind_of_image_becomes_whole_while_it_is_used() {
    let kinds = Kind::all().filter(|kind| !kind.has("data_file") && !kind.has("preallocation"));
    for kind in kinds {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        without_snapshots(kind, dir, |served| {
            let args = ["stream", "start", &served.api()];
            refused(1, &args, &["internal snapshots"]);
        });
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(1300 + kind.number);
        let image = as_arg(&dir.join("i"));
        let mut served = Served::start(&image, &kind.serve_args());
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            // Stops the stream before its end.
            start(&served, &["--speed", "1M"]);
            exercise(disk, &mut model, &mut random);
            let told = stdout_of(&["stream", "stop", &served.api()]);
            await_end(&served);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            // (The stream may have had little left to copy.)
            if told.starts_with("done") {
                return assert_eq!(below(dir, &image), Value::Null);
            }
            assert_eq!(below(dir, &image), "base");
            thread::scope(|scope| {
                let streamed = scope.spawn(|| start(&served, &["--wait", "--speed", "40M"]));
                while !streamed.is_finished() {
                    exercise(disk, &mut model, &mut random);
                }
                streamed.join().unwrap();
            });
            await_end(&served);
            assert_eq!(below(dir, &image), Value::Null);
            fs::remove_file(dir.join("base")).unwrap();
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        kind.is_clean(dir);
        assert_eq!(
            differ(&flat(dir, kind.format, &image), &model),
            None,
            "{kind:?}"
        );
    }
}

/// Makes an image of this kind, on two other images, on a raw image that has data everywhere.
/// Returns the contents of the disk.
fn chain(kind: Kind, dir: &Path) -> Vec<u8> {
    qemu_img(dir, &["create", "-q", "-f", "raw", "ground", "12M"]);
    qemu_io(dir, "ground", "raw", &["write -P 0x77 0 12M"]);
    let on = |format: &str, below: &str, of: &str, image: &str, size: &str, options: &str| {
        let create = ["create", "-q", "-f", format, "-b", below, "-F", of, image];
        let options: &[&str] = if options.is_empty() {
            &[]
        } else {
            &["-o", options]
        };
        qemu_img(dir, &[&create[..], &[size], options].concat());
    };
    on("qcow2", "ground", "raw", "low", "12M", "");
    qemu_io(
        dir,
        "low",
        "qcow2",
        &[
            "write -P 0x21 1M 3M",
            "write -z 5M 1M",
            "write -c -P 9 6M 64k",
        ],
    );
    // Behind the end of this shorter image, the image above it reads zeroes.
    on("qcow2", "low", "qcow2", "short", "8M", "cluster_size=4k");
    qemu_io(
        dir,
        "short",
        "qcow2",
        &["write -P 0x31 2M 100k", "write -z 3M 20k"],
    );
    on(kind.format, "short", "qcow2", "i", "12M", kind.options);
    qemu_io(dir, "i", kind.format, &["write -P 0x41 2050k 30k"]);
    kind.contents(dir, None)
}

#[test]
fn images_between_go_and_others_come_while_it_is_used() {
    let kinds = Kind::all().filter(|kind| !kind.has("data_file") && !kind.has("preallocation"));
    for kind in kinds {
        let to = ["low", "ground", "new"][kind.number % 3];
        eprintln!("{kind:?} {to}");
        let dir = kind.dir();
        let dir = dir.path();
        let mut model = chain(kind, dir);
        // The new base has mostly the same data as the old one.
        qemu_img(dir, &["create", "-q", "-f", "qed", "new", "9M"]);
        qemu_io(
            dir,
            "new",
            "qed",
            &["write -P 0x77 0 1M", "write -P 0x21 1M 4M"],
        );
        let mut random = Random::new(1400 + kind.number);
        let (image, base) = (as_arg(&dir.join("i")), as_arg(&dir.join(to)));
        let mut served = Served::start(&image, &kind.serve_args());
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            let mut args = vec!["--wait", "--speed", "60M", "--base", &base];
            if to == "new" {
                args.extend(["-F", "qed"]);
            }
            thread::scope(|scope| {
                let streamed = scope.spawn(|| start(&served, &args));
                while !streamed.is_finished() {
                    exercise(disk, &mut model, &mut random);
                }
                streamed.join().unwrap();
            });
            await_end(&served);
            assert_eq!(below(dir, &image), to);
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?} {to}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        kind.is_clean(dir);
        let is = flat(dir, kind.format, &image);
        assert_eq!(differ(&is, &model), None, "{kind:?} {to}");
    }
}

/// Relative names in an image start at the directory of the link by which the image is opened.
#[test]
fn a_disk_that_is_a_link_finds_what_is_below_it() {
    let (links, images) = (disk_dir(), disk_dir());
    let path = |name: &str| as_arg(&images.path().join(name));
    let (low, mid, top) = (path("low"), path("mid"), path("top"));
    let create = |more: &[&str]| qemu_img(images.path(), &[&["create", "-q", "-f"], more].concat());
    create(&["raw", &low, "4M"]);
    qemu_io(images.path(), &low, "raw", &["write -P 1 0 1M"]);
    create(&["qcow2", "-b", &low, "-F", "raw", &mid]);
    qemu_io(images.path(), &mid, "qcow2", &["write -P 2 1M 1M"]);
    create(&["qcow2", "-b", &mid, "-F", "qcow2", &top]);
    let link = as_arg(&links.path().join("disk"));
    std::os::unix::fs::symlink(&top, &link).unwrap();
    let dir = as_arg(images.path());
    let served = Served::start(&link, &["--format", "qcow2", "--allow-dir", &dir]);
    with_disk(&served.arg("s"), 1, |disk| {
        let before = disk.contents();
        start(&served, &["--wait", "--base", &low]);
        await_end(&served);
        assert!(disk.contents() == before);
        assert_eq!(below(links.path(), &link), *low);
        fs::remove_file(&mid).unwrap();
        assert!(flat(links.path(), "qcow2", &link) == before);
    });
}

#[test]
fn what_is_the_same_is_not_copied() {
    let dir = disk_dir();
    let dir = dir.path();
    qemu_img(dir, &["create", "-q", "-f", "raw", "base", "12M"]);
    qemu_io(dir, "base", "raw", &["write -P 1 0 4M"]);
    let create = [
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "i",
    ];
    qemu_img(dir, &create);
    fs::copy(dir.join("base"), dir.join("other")).unwrap();
    qemu_io(
        dir,
        "other",
        "raw",
        &["write -P 2 1M 64k", "write -P 3 8M 64k"],
    );
    let image = as_arg(&dir.join("i"));
    let served = Served::start(&image, &["--format", "qcow2"]);
    let model = with_disk(&served.arg("s"), 1, |disk| {
        let model = disk.contents();
        start(&served, &["--wait", "--base", &as_arg(&dir.join("other"))]);
        assert!(disk.contents() == model);
        model
    });
    let shown = stdout_of(&["stream", "show", &served.api(), "--json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (&shown["phase"], &shown["left"]),
        (&"done".into(), &0.into())
    );
    assert_eq!(shown["copied"], 128 << 10);
    drop(served);
    let map = qemu_img(dir, &["map", "--output", "json", "i"]);
    let map: Vec<Value> = serde_json::from_str(&map).unwrap();
    let own = map.iter().filter(|extent| extent["depth"] == 0);
    let own: Vec<_> = own
        .map(|extent| extent["start"].as_u64().unwrap())
        .collect();
    assert_eq!(own, [1 << 20, 8 << 20]);
    assert_eq!(differ(&flat(dir, "qcow2", &image), &model), None);
    assert_eq!(model.len() as u64, SIZE);
}

#[test]
fn whenever_the_server_is_killed_it_is_the_same_disk() {
    let dir = disk_dir();
    let dir = dir.path();
    let mut random = Random::new(13);
    let mut served = keep::start(short_dir(), "");
    let mut rounds = KillRounds::new();
    while let Some(round) = rounds.next() {
        let path = |name: &str| as_arg(&dir.join(format!("{name}{round}")));
        let (base, image, log) = (path("b"), path("i"), dir.join("written"));
        let format = ["qcow2", "qed"][round % 2];
        qemu_img(dir, &["create", "-q", "-f", "raw", &base, "4M"]);
        qemu_io(dir, &base, "raw", &["write -P 251 0 4M"]);
        qemu_img(
            dir,
            &[
                "create", "-q", "-f", format, "-b", &base, "-F", "raw", &image,
            ],
        );
        let api = served.api();
        let add = ["disk", "add", "--server", &api, "d", &image];
        stdout_of(&[&add[..], &["--format", format]].concat());
        let load = write_in_order(&served_uri(&served), &log);
        eventually("writes", || (written(&log) > 20).then_some(()));
        let mut streams = fathom();
        streams.args([
            "stream", "start", &api, "--quiet", "--wait", "--speed", "40M",
        ]);
        let streams = Kept::spawn(streams.stderr(Stdio::null()));
        thread::sleep(rounds.pause(&mut random, Duration::from_millis(200)));
        served = keep::again(served, "KILL", "");
        drop(streams);
        drop(load);
        let contents = after_a_kill(&served, &log, 251);
        // The same command completes the stream after the kill.
        let api = served.api();
        let is_whole = below(dir, &image).is_null();
        rounds.note(is_whole);
        if !is_whole {
            start(&served, &["--disk", "d", "--wait"]);
        }
        stdout_of(&["disk", "remove", &api, "--disk", "d", "--force"]);
        fs::remove_file(&base).unwrap();
        check_killed(dir, format, &image);
        assert!(flat(dir, format, &image) == contents, "round {round}");
    }
}

#[test]
fn what_cannot_be_streamed_is_refused() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, image, top) = (path("base"), path("i"), path("top"));
    let create = |more: &[&str]| qemu_img(dir.path(), &[&["create", "-q", "-f"], more].concat());
    create(&["raw", &base, "4M"]);
    qemu_io(dir.path(), &base, "raw", &["write -P 1 0 4M"]);
    create(&["qcow2", "-b", &base, "-F", "raw", &image]);
    create(&["qcow2", "-b", &image, "-F", "qcow2", &top]);
    create(&["qcow2", &path("whole"), "4M"]);
    let elsewhere = disk_dir();
    let far = as_arg(&elsewhere.path().join("far"));
    create(&["raw", &far, "4M"]);
    let qcow2 = ["--format", "qcow2"];
    let refuses = |disk: &str, args: &[&str], more: &[&str], why: &[&str]| {
        let served = Served::start(disk, args);
        with_disk(&served.arg("s"), 1, |disk| {
            refused(
                1,
                &[&["stream", "start", &served.api()], more].concat(),
                why,
            );
            disk.contents()
        });
    };
    refuses(&base, &[], &[], &["a raw image has no backing image"]);
    refuses("memory:1M", &[], &[], &["not a file"]);
    refuses(&path("whole"), &qcow2, &[], &["no backing image"]);
    refuses(
        &image,
        &qcow2,
        &["--base", &base],
        &["already its backing image"],
    );
    refuses(
        &image,
        &qcow2,
        &["--base", &path("no")],
        &["cannot find the image"],
    );
    refuses(&image, &qcow2, &["--base", &far], &["--allow-dir"]);
    refuses(&image, &qcow2, &["--base", &path("whole")], &["qcow2"]);
    let on_itself = ["--base", &*top, "-F", "qcow2"];
    refuses(
        &image,
        &qcow2,
        &on_itself,
        &["has", &image, "in its backing chain"],
    );
    let itself = ["--base", &*image, "-F", "qcow2"];
    refuses(&image, &qcow2, &itself, &["in its backing chain"]);
    let served = Served::start(&image, &qcow2);
    let api = served.api();
    refused(1, &["stream", "show", &api], &["no stream"]);
    refused(1, &["stream", "stop", &api], &["no stream"]);
    with_disk(&served.arg("s"), 1, |_| {
        start(&served, &["--speed", "64k"]);
        refused(
            1,
            &["commit", &api, &base, "--transient"],
            &["is being changed"],
        );
        refused(1, &["resize", &api, "8M"], &["is being changed"]);
        refused(1, &["backup", "start", &api], &["is being changed"]);
        refused(1, &["stream", "start", &api], &["is being changed"]);
        refused(1, &["disk", "remove", &api], &["in use by"]);
        stdout_of(&["stream", "stop", &api]);
    });
    refused(1, &["stream", "show", &api], &["no stream"]);
}
