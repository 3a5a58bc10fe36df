//! Disks that get other sizes while they are served.

use crate::driver::{Request, with_disk};
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

/// Requests of a driver that checks what it reads, in the first part of the disk.
fn load(served: &Served, part: &str) -> Kept {
    let socket = served.arg("s");
    let mut command = fathom();
    command.args(["bench", "--vhost-user", &socket, "--rw", "randrw"]);
    command.args(["--verify", "--size", part, "--number-ios", "100000"]);
    Kept::spawn(command.args(["--ramp-time", "0"]))
}

/// What the disk has from `at` on.
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
    let kinds: [(&str, &[&str]); 4] = [
        (&image, &["--iothreads", "2"]),
        (&image, &["--cache", "writeback", "--aio", "threads"]),
        ("memory:16M", &[]),
        ("null:16M", &[]),
    ];
    for (disk, args) in kinds {
        let served = Served::start(disk, args);
        let mut load = (!disk.starts_with("null")).then(|| load(&served, "8M"));
        for size in [20, 64, 12, 16] {
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
            assert!(load.0.wait().unwrap().success());
        }
        assert_eq!(read(&served, 16 * MIB - 512).map(|b| b.len()), Ok(512));
        assert!(read(&served, 16 * MIB).is_err());
        if disk.starts_with('/') {
            assert_eq!(fs::metadata(disk).unwrap().len(), 16 * MIB);
        }
    }
}

#[test]
fn a_disk_that_nobody_uses_is_resized() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    fs::write(&image, vec![7; MIB as usize]).unwrap();
    let served = Served::start(&as_arg(&image), &[]);
    assert_eq!(resize(&served, &["3M"]), 3 * MIB);
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
    // Somebody else has it.
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
        (&["--readonly"], "reading only"),
        (&["--filter", "readonly"], "reading only"),
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
