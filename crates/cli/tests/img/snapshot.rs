//! Compares `fathom img snapshot` with `qemu-img snapshot`.

use crate::pair::{Pair, sample};
use crate::support::{as_arg, disk_dir, refused, stdout_of};
use crate::{create, qemu_img, qemu_uses};
use serde_json::Value;
use std::io::Write;
use std::process::{Command, Stdio};

/// Options of images that can have snapshots.
const IMAGES: &[&str] = &[
    "cluster_size=64k",
    "cluster_size=16k,extended_l2=on",
    "compat=0.10,cluster_size=512",
    "cluster_size=512,refcount_bits=32",
    "cluster_size=1k,refcount_bits=64",
    "cluster_size=4k,refcount_bits=8,lazy_refcounts=on",
    "cluster_size=8k,compression_type=zstd",
    "cluster_size=32k,extended_l2=on,refcount_bits=32",
    "cluster_size=2M",
    "compat=0.10",
    "cluster_size=64k,preallocation=metadata",
];

/// Runs the same steps by Fathom and by QEMU, on disks that share clusters with their snapshots.
fn steps(pair: &Pair) {
    pair.io(&["write -P 1 0 200k", "write -P 2 1M 65k"]);
    pair.both(&["snapshot", "-c", "s1"]);
    let s1 = pair.disk(0, None);
    pair.io(&[
        "write -P 3 10k 70k",
        "write -P 4 1500k 100k",
        "discard 100k 64k",
    ]);
    pair.snapshot_is("s1", &s1);
    pair.both(&["snapshot", "-c", "s2"]);
    let s2 = pair.disk(0, None);
    pair.io(&["write -P 5 30k 70k", "discard 1M 200k"]);
    // On the copy of the pair, each tool changes the other's image.
    let crossed = pair.copy();
    crossed.swapped(&["snapshot", "-a", "s1"]);
    pair.both(&["snapshot", "-a", "s1"]);
    assert!(pair.disk(0, None) == s1 && crossed.disk(0, None) == s1);
    pair.snapshot_is("s2", &s2);
    pair.io(&["write -P 6 0 20k", "write -P 9 600k 700k"]);
    pair.both(&["snapshot", "-d", "s1"]);
    pair.snapshot_is("s2", &s2);
    pair.io(&["write -P 7 15k 20k", "write -P 8 600k 700k"]);
    pair.snapshot_is("s2", &s2);
    pair.both(&["snapshot", "-a", "s2"]);
    pair.both(&["snapshot", "-d", "s2"]);
    assert!(pair.disk(0, None) == s2);
}

#[test]
fn snapshots_are_taken_applied_and_deleted_as_by_qemu_img() {
    for options in sample(IMAGES, 4) {
        let pair = Pair::new(options, false);
        steps(&pair);
    }
}

#[test]
fn snapshots_have_compressed_clusters_and_backing_files() {
    for options in sample(&["cluster_size=64k", "cluster_size=512", "compat=0.10"], 1) {
        steps(&Pair::new(options, true));
    }
    for options in sample(&["", ",cluster_size=16k,extended_l2=on"], 2) {
        let options = format!("backing_file=base,backing_fmt=raw{options}");
        steps(&Pair::new(&options, false));
    }
}

#[test]
fn a_snapshot_brings_its_size_back() {
    let pair = Pair::new("cluster_size=4k", false);
    pair.io(&["write -P 1 0 2M"]);
    pair.both(&["snapshot", "-c", "two"]);
    let two = pair.disk(0, None);
    for (size, name) in [("1M", "one"), ("9M", "nine")] {
        pair.both(&["resize", "-q", "--shrink", "{}", size]);
        pair.io(&["write -P 2 500k 100k"]);
        pair.both(&["snapshot", "-c", name]);
    }
    for (name, mib) in [("two", 2), ("nine", 9), ("one", 1), ("two", 2)] {
        pair.both(&["snapshot", "-a", name]);
        assert_eq!(pair.disk(0, None).len(), mib << 20);
    }
    assert!(pair.disk(0, None) == two);
}

#[test]
fn snapshots_are_listed_as_by_qemu_img() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    create(&image, &["-q", "-f", "qcow2", "-o", "size=1M"]);
    let list = |more: &[&str]| stdout_of(&[&["img", "snapshot"], more, &[&image]].concat());
    assert_eq!(list(&[]), qemu_img(&["snapshot", "-l", &image]));
    for name in ["eins", "2", "", "a name of more than sixteen bytes"] {
        qemu_img(&["snapshot", "-c", name, &image]);
        stdout_of(&["img", "snapshot", "--create", name, &image]);
    }
    for option in [&["-l"][..], &["--list", "-U"], &[]] {
        assert_eq!(list(option), qemu_img(&["snapshot", "-l", &image]));
    }
    let theirs: Value =
        serde_json::from_str(&qemu_img(&["info", "--output=json", &image])).unwrap();
    let mine: Value = serde_json::from_str(&list(&["--json"])).unwrap();
    assert_eq!(mine, theirs["snapshots"]);
    // The argument "2" is an ID as well as a name.
    let id = |option: &str| -> Value {
        let said = list(&[option, "2", "--json"]);
        let said: Value = serde_json::from_str(&said).unwrap();
        said["id"].clone()
    };
    assert_eq!((id("--apply"), id("--delete")), ("2".into(), "3".into()));
    assert_eq!(list(&["--delete", "8"]), "");
    assert_eq!(list(&["-l"]), qemu_img(&["snapshot", "-l", &image]));
    assert_eq!(list(&["-l"]).lines().count(), 2 + 6);
    let raw = as_arg(&dir.path().join("raw"));
    create(&raw, &["-q", "-o", "size=1M"]);
    assert_eq!(stdout_of(&["img", "snapshot", &raw]), "");
}

#[test]
fn what_cannot_be_is_told() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let made = |name: &str, format: &str, options: &str| {
        create(&path(name), &["-q", "-f", format, "-o", options]);
    };
    made("raw", "raw", "size=1M");
    made("qed", "qed", "size=1M");
    made("data", "qcow2", &format!("size=1M,data_file={}", path("d")));
    made("one", "qcow2", "size=1M,refcount_bits=1");
    made("bits", "qcow2", "size=1M");
    made("old", "qcow2", "size=1M,compat=0.10");
    made("bad", "qcow2", "size=1M");
    qemu_img(&["bitmap", "--add", &path("bits"), "b"]);
    for name in ["bits", "old"] {
        stdout_of(&["img", "snapshot", "-c", "s", &path(name)]);
    }
    let write = ["-c", "write 0 1", &path("one")];
    let wrote = Command::new("qemu-io").args(write).output();
    assert!(wrote.expect("qemu-io").status.success());
    let mark = |offset: u64, byte: u8| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(path("bad"));
        file.unwrap().write_all_at(&[byte], offset).unwrap();
    };
    for (name, args, words) in [
        (
            "raw",
            &["-c", "s"][..],
            "raw images have no internal snapshots",
        ),
        ("qed", &["-a", "s"], "only qcow2"),
        ("data", &["-c", "s"], "external data file"),
        ("one", &["-c", "s"], "refcounts of 1 bits"),
        ("bits", &["-a", "s"], "bitmaps"),
        ("bits", &["-d", "t"], "no snapshot 't'"),
        ("gone", &["-d", "t"], "no such file"),
    ] {
        let before = std::fs::read(path(name)).ok();
        refused(
            1,
            &[&["img", "snapshot"], args, &[&path(name)]].concat(),
            &[words],
        );
        assert!(
            std::fs::read(path(name)).ok() == before,
            "{name} was changed"
        );
    }
    for (offset, byte, words) in [(79, 2, "marked corrupt"), (79, 0, ""), (47, 1, "L1 table")] {
        mark(offset, byte);
        if !words.is_empty() {
            refused(1, &["img", "snapshot", "-c", "s", &path("bad")], &[words]);
        }
    }
    refused(
        2,
        &["img", "snapshot", "-l", "-c", "s", &path("bad")],
        &["--list"],
    );
}

/// Returns the output of QEMU's monitor for commands to a stopped machine.
fn monitor(image: &str, commands: &str) -> String {
    let drive = format!("if=virtio,format=qcow2,file={image}");
    let mut machine = Command::new("qemu-system-x86_64")
        .args([
            "-M",
            "pc",
            "-m",
            "8",
            "-nodefaults",
            "-display",
            "none",
            "-S",
        ])
        .args(["-monitor", "stdio", "-drive", &drive])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("QEMU is installed by `make setup`");
    let stdin = machine.stdin.as_mut().expect("stdin");
    stdin.write_all(commands.as_bytes()).expect("told");
    let output = machine.wait_with_output().expect("QEMU ends");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn vm_state_stays_in_the_snapshot_and_not_in_the_disk() {
    let pair = Pair::new("cluster_size=4k", false);
    pair.io(&["write -P 1 0 2M"]);
    for which in [0, 1] {
        monitor(&pair.path(which), "savevm vm\nquit\n");
    }
    let disk = pair.disk(0, None);
    pair.io(&["write -P 2 1M 64k"]);
    pair.both(&["snapshot", "-a", "vm"]);
    let loaded = monitor(&pair.path(0), "loadvm vm\nquit\n");
    assert!(!loaded.contains("Error"), "{loaded}");
    // The grown disk covers the offsets at which the VM state was stored.
    stdout_of(&["img", "resize", &pair.path(0), "50M"]);
    let grown = pair.disk(0, None);
    assert!(grown[..2 << 20] == disk && grown[2 << 20..].iter().all(|b| *b == 0));
    stdout_of(&["img", "snapshot", "-a", "vm", &pair.path(0)]);
    let loaded = monitor(&pair.path(0), "loadvm vm\nquit\n");
    assert!(!loaded.contains("Error"), "{loaded}");
    pair.both(&["snapshot", "-d", "vm"]);
    assert!(pair.disk(0, None) == disk);
}

/// Leaves an image in the state in which a killed process leaves it.
pub fn abandon(image: &str, format: &str) {
    let args = [
        "-f",
        format,
        "-c",
        "write -P 3 0 300k",
        "-c",
        "abort",
        image,
    ];
    let output = Command::new("qemu-io").args(args).output();
    assert!(!output.expect("qemu-io").status.success());
    let said = stdout_of(&["img", "info", "--json", "-f", format, image]);
    let info: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(info["dirty-flag"], true, "{said}");
}

#[test]
fn an_image_that_was_not_closed_is_repaired_first() {
    let options = "cluster_size=4k,lazy_refcounts=on";
    for args in [
        &["snapshot", "-c", "t"][..],
        &["snapshot", "-a", "s"],
        &["snapshot", "-d", "s"],
    ] {
        let pair = Pair::new(options, false);
        pair.io(&["write -P 1 100k 900k"]);
        pair.both(&["snapshot", "-c", "s"]);
        abandon(&pair.path(0), "qcow2");
        std::fs::copy(pair.path(0), pair.path(1)).expect("a copy");
        pair.both(args);
    }
    let pair = Pair::new(options, false);
    abandon(&pair.path(0), "qcow2");
    std::fs::copy(pair.path(0), pair.path(1)).expect("a copy");
    pair.both(&["resize", "-q", "{}", "9M"]);
}

#[test]
fn images_in_use_are_left_alone() {
    let pair = Pair::new("cluster_size=64k", false);
    let image = pair.path(0);
    let mut user = qemu_uses(&image);
    let before = std::fs::read(&image).expect("the image");
    for args in [
        &["snapshot", "-c", "s"][..],
        &["snapshot", "-l"],
        &["resize"],
    ] {
        let size = if args[0] == "resize" {
            &["9M"][..]
        } else {
            &[]
        };
        let args = [&["img"], args, &[&image], size].concat();
        refused(1, &args, &["in use"]);
    }
    assert_eq!(stdout_of(&["img", "snapshot", "-U", &image]), "");
    assert!(std::fs::read(&image).expect("the image") == before);
    drop(user.stdin.take());
    user.wait().expect("qemu-io ends");
    pair.both(&["snapshot", "-c", "s"]);
}
