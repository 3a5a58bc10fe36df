//! Checks disks that are resized while they are served.

use crate::driver::{Request, with_disk};
use crate::exercise::{Random, differ, exercise};
use crate::kinds::{Kind, SIZE, qemu_img};
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, refused, stdout_of};
use serde_json::Value;
use std::fs;

const MIB: u64 = 1 << 20;

fn resize(served: &Served, more: &[&str]) -> u64 {
    let control = served.api();
    let said = stdout_of(&[&["resize", &control][..], more, &["--json"]].concat());
    let said: Value = serde_json::from_str(&said).expect("JSON");
    said["size"].as_u64().expect("a number")
}

/// Starts a load that verifies what it reads, in the first part of the disk, until it is
/// interrupted.
fn load(served: &Served, part: &str) -> Kept {
    let socket = served.arg("s");
    let mut command = fathom();
    command.args(["bench", "--vhost-user", &socket, "--rw", "randrw"]);
    command.args(["--verify", "--size", part, "--runtime", "600s"]);
    let load = Kept::spawn(command.args(["--ramp-time", "0"]));
    eventually("it has begun", || {
        let info = stdout_of(&["info", &served.api()]);
        (!info.contains("queues:     0 running")).then_some(())
    });
    load
}

/// Reads a sector of the disk.
fn read(served: &Served, at: u64) -> Result<Vec<u8>, i32> {
    with_disk(&served.arg("s"), 1, |disk| {
        let read = Request::Read {
            offset: at,
            len: 512,
        };
        disk.all(&[read]).remove(0)
    })
}

#[test]
fn a_disk_grows_and_shrinks_under_load() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    fs::write(&image, vec![0; 16 * MIB as usize]).unwrap();
    let image = as_arg(&image);
    let images = [("qcow2", "qcow2"), ("qed", "qed")].map(|(name, format)| {
        qemu_img(dir.path(), &["create", "-q", "-f", format, name, "16M"]);
        as_arg(&dir.path().join(name))
    });
    let kinds: [(&str, &[&str]); 6] = [
        (&images[0], &["--format", "qcow2", "--iothreads", "2"]),
        (&images[1], &["--format", "qed", "--iothreads", "2"]),
        (&image, &["--iothreads", "2"]),
        (&image, &["--cache", "writeback", "--aio", "threads"]),
        ("memory:16M", &[]),
        ("null:16M", &[]),
    ];
    for (disk, args) in kinds {
        let mut served = Served::start(disk, args);
        let mut load = (!disk.starts_with("null")).then(|| load(&served, "8M"));
        let is_qed = disk.ends_with("qed");
        let sizes: &[u64] = if is_qed {
            &[17, 20, 900]
        } else {
            &[20, 900, 12, 16]
        };
        for size in sizes.iter().copied() {
            let wanted = format!("{size}M");
            assert_eq!(
                resize(&served, &[&wanted, "--shrink"]),
                size * MIB,
                "{disk}"
            );
        }
        let control = served.api();
        refused(1, &["resize", &control, "8M"], &["--shrink"]);
        refused(1, &["resize", &control, "0"], &["512"]);
        refused(1, &["resize", &control, "1000"], &["multiple of 512"]);
        if let Some(load) = &mut load {
            load.signal("INT");
            assert!(load.0.wait().unwrap().success());
        }
        let end = sizes.last().unwrap() * MIB;
        assert_eq!(read(&served, end - 512).map(|b| b.len()), Ok(512));
        assert!(read(&served, end).is_err());
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        if disk == image {
            assert_eq!(fs::metadata(disk).unwrap().len(), end);
        } else if disk.starts_with('/') {
            let format = if is_qed { "qed" } else { "qcow2" };
            qemu_img(dir.path(), &["check", "-q", "-f", format, disk]);
        }
    }
}

#[test]
fn a_disk_that_nobody_uses_is_resized() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    fs::write(&image, vec![7; MIB as usize]).unwrap();
    let served = Served::start(&as_arg(&image), &[]);
    assert_eq!(resize(&served, &["+3M"]), 4 * MIB);
    refused(1, &["resize", &served.api(), "-1M"], &["--shrink"]);
    refused(
        1,
        &["resize", &served.api(), "-5M", "--shrink"],
        &["out of range"],
    );
    assert_eq!(resize(&served, &["-1M", "--shrink"]), 3 * MIB);
    assert_eq!(fs::metadata(&image).unwrap().len(), 3 * MIB);
    with_disk(&served.arg("s"), 1, |disk| {
        assert_eq!(disk.size(), 3 * MIB);
        let contents = disk.contents();
        assert!(contents[..MIB as usize].iter().all(|byte| *byte == 7));
        assert!(contents[MIB as usize..].iter().all(|byte| *byte == 0));
    });
    eventually("the front-end is gone", || {
        let info: Value =
            serde_json::from_str(&stdout_of(&["info", &served.api(), "--json"])).unwrap();
        info["front_end"].is_null().then_some(())
    });
    // Another server uses the image.
    let other = Served::start(&as_arg(&image), &[]);
    let _held = load(&other, "1M");
    eventually("the image is in use", || {
        let info = stdout_of(&["info", &served.api()]);
        info.contains("held by:").then_some(())
    });
    refused(1, &["resize", &served.api(), "4M"], &["in use by"]);
    assert_eq!(fs::metadata(&image).unwrap().len(), 3 * MIB);
}

#[test]
fn what_cannot_be_resized_says_so() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    fs::write(&image, vec![0; MIB as usize]).unwrap();
    let image = as_arg(&image);
    let cases: [(&[&str], &str); 4] = [
        (&["--readonly"], "read-only"),
        (&["--filter", "readonly"], "read-only"),
        (&["--size", "512k"], "--size"),
        (&["--filter", "cow"], "cow"),
    ];
    for (args, word) in cases {
        let served = Served::start(&image, args);
        for size in ["2M", "256k"] {
            let args = ["resize", &served.api(), size, "--shrink"];
            refused(1, &args, &[word]);
        }
        assert_eq!(fs::metadata(&image).unwrap().len(), MIB);
    }
}

/// Resizes the disk, which must succeed, and the model of its contents.
fn step(served: &Served, model: &mut Vec<u8>, size: u64) {
    assert_eq!(resize(served, &[&size.to_string(), "--shrink"]), size);
    model.resize(size as usize, 0);
}

#[test]
fn images_of_all_kinds_are_resized_while_they_are_used() {
    for kind in Kind::all() {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let mut model = kind.contents(dir, None);
        let snapshot = kind.snapshot(dir);
        let mut random = Random::new(kind.number);
        let data = as_arg(&dir.join("data.raw"));
        let image = as_arg(&dir.join("i"));
        let mut served = Served::start(&image, &kind.serve_writable(&data));
        if kind.has("compat=0.10") {
            with_disk(&served.arg("s"), 1, |disk| {
                refused(1, &["resize", &served.api(), "20M"], &["version 2"]);
                assert_eq!(differ(&disk.contents(), &model), None);
            });
            continue;
        }
        let control = served.api();
        let early = ["resize", &control, "20M"];
        refused(1, &early, &["virtual machine has not connected"]);
        let shrinks = kind.format == "qcow2";
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            step(&served, &mut model, 37 * MIB + 512);
            assert_eq!(disk.size(), 37 * MIB + 512);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            exercise(disk, &mut model, &mut random);
            let args = ["resize", &control, "5M", "--shrink"];
            match shrinks {
                true => step(&served, &mut model, 5 * MIB + 512),
                false => refused(1, &args, &["cannot shrink"]),
            }
            let end = disk.size();
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            let past = Request::Read {
                offset: end - 512,
                len: 1024,
            };
            assert!(disk.all(&[past])[0].is_err());
            step(&served, &mut model, end.max(SIZE) + 1024);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            exercise(disk, &mut model, &mut random);
        });
        let word = if shrinks {
            "exceeds the limit"
        } else {
            "at most"
        };
        refused(1, &["resize", &control, "7E"], &[word]);
        refused(1, &["resize", &control, "8E"], &["exceed the largest size"]);
        // No front-end is connected.
        eventually("nobody uses it", || {
            let info = stdout_of(&["info", &control]);
            info.contains("queues:     0 running").then_some(())
        });
        let size = model.len() as u64 + 3 * MIB;
        step(&served, &mut model, size);
        with_disk(&served.arg("s"), 1, |disk| {
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert_eq!(differ(&kind.contents(dir, None), &model), None, "{kind:?}");
        kind.is_clean(dir);
        if let Some(before) = snapshot {
            let now = kind.contents(dir, Some("first"));
            assert_eq!(differ(&now[..before.len()], &before), None, "{kind:?}");
        }
    }
}

#[test]
fn an_image_with_bitmaps_keeps_its_size() {
    let dir = disk_dir();
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "i", "12M"]);
    qemu_img(dir.path(), &["bitmap", "--add", "--disable", "i", "b"]);
    let image = as_arg(&dir.path().join("i"));
    let served = Served::start(&image, &["--format", "qcow2"]);
    with_disk(&served.arg("s"), 1, |disk| {
        refused(1, &["resize", &served.api(), "20M"], &["bitmaps"]);
        assert_eq!(disk.size(), SIZE);
    });
}

#[test]
fn nbd_clients_resize_an_image_when_nobody_is_connected() {
    let dir = disk_dir();
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "i", "12M"]);
    let image = as_arg(&dir.path().join("i"));
    let mut command = fathom();
    let socket = format!("unix:{}", as_arg(&dir.path().join("n")));
    let control = as_arg(&dir.path().join("c"));
    command.args(["serve", &image, "--format", "qcow2", "--nbd", &socket]);
    let mut served = Served::spawn(
        {
            command.args(["--api", &control]);
            command
        },
        disk_dir(),
    );
    served.wait_for("NBD clients connect to");
    stdout_of(&["disk", "resize", &control, "20M"]);
    let said = qemu_img(dir.path(), &["info", "--force-share", "i"]);
    assert!(said.contains("20 MiB"), "{said}");
    // The server accepts the size that another program has set.
    qemu_img(dir.path(), &["resize", "-q", "i", "24M"]);
    let said = stdout_of(&["resize", &control]);
    assert_eq!(said, "the disk has 24 MiB (25165824 bytes)\n");
    let uri = format!("nbd+unix:///?socket={}", as_arg(&dir.path().join("n")));
    let args = ["bench", "--nbd", &uri, "--rw", "randrw", "--verify"];
    stdout_of(&[&args[..], &["--number-ios", "500", "--offset", "20M"]].concat());
}
