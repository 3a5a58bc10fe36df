//! `fathom img measure` says the same as `qemu-img measure`.

use crate::pair::{io, sample};
use crate::support::{as_arg, disk_dir, refused, run, stdout_of};
use crate::{create, qemu_img};
use serde_json::Value;
use std::process::Command;

const OPTIONS: &[&str] = &[
    "extended_l2=on",
    "cluster_size=512",
    "compat=0.10",
    "preallocation=full",
    "backing_file=x,backing_fmt=raw",
    "cluster_size=4k,refcount_bits=64",
    "extended_l2=on,cluster_size=16k",
    "preallocation=metadata",
    "preallocation=falloc",
    "cluster_size=2M",
    "cluster_size=1k,refcount_bits=1",
    "data_file=x",
];

const SIZES: &[&str] = &[
    "0",
    "1000000",
    "12345678901",
    "8T",
    "1",
    "511",
    "1M",
    "10G",
    "2P",
];

/// Whether both say the same for programs and for people, or both refuse.
fn compare(args: &[&str]) {
    for output in ["--output=json", "--output=human"] {
        let args = [&["measure", output], args].concat();
        let mine = run(&[&["img"], &args[..]].concat());
        let theirs = Command::new("qemu-img").args(&args).output();
        let theirs = theirs.expect("qemu-img is installed by `make setup`");
        assert_eq!(mine.status.code(), theirs.status.code(), "{args:?}");
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
        match json(&mine.stdout) {
            Some(mine) => assert_eq!(Some(mine), json(&theirs.stdout), "{args:?}"),
            None => assert_eq!(mine.stdout, theirs.stdout, "{args:?}"),
        }
    }
}

#[test]
fn empty_disks_need_what_qemu_img_says() {
    for size in sample(SIZES, 4) {
        compare(&["--size", size]);
        for options in sample(OPTIONS, 5) {
            compare(&["-O", "qcow2", "-o", options, "--size", size]);
        }
    }
}

#[test]
fn images_need_what_qemu_img_says() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, top) = (path("base"), path("top"));
    create(&base, &["-q", "-osize=3M"]);
    io(&base, "raw", &["write -P 1 64k 100k", "write -P 2 1M 512k"]);
    let options = [
        "-q",
        "-f",
        "qcow2",
        "-b",
        "base",
        "-F",
        "raw",
        "-oextended_l2=on",
    ];
    create(&top, &[&options[..], &["-osize=8M"]].concat());
    let writes = ["write -P 5 0 5k", "write -z 3M 1M", "write -P 7 7M 256k"];
    io(&top, "qcow2", &writes);
    io(&top, "qcow2", &["write -c 6M 128k"]);
    qemu_img(&["snapshot", "-c", "s", &top]);
    qemu_img(&["bitmap", "--add", &top, "a"]);
    qemu_img(&["bitmap", "--add", "-g", "512", &top, "another"]);
    io(&top, "qcow2", &["write -P 8 5M 500k"]);
    let others: [(&str, &[&str]); 4] = [
        ("v2", &["-f", "qcow2", "-ocompat=0.10"]),
        ("metadata", &["-f", "qcow2", "-opreallocation=metadata"]),
        ("qed", &["-f", "qed"]),
        ("empty", &["-f", "qcow2", "-osize=0"]),
    ];
    for (name, options) in others {
        create(&path(name), &[&["-q", "-osize=5M"], options].concat());
    }
    std::fs::write(path("odd"), [1; 700]).expect("a file");
    for name in ["base", "top", "v2", "metadata", "qed", "empty", "odd"] {
        compare(&[&path(name)]);
        compare(&["-O", "qcow2", &path(name)]);
        for options in sample(OPTIONS, 3) {
            compare(&["-O", "qcow2", "-o", options, &path(name)]);
        }
    }
    compare(&["-O", "qcow2", "-l", "s", &top]);
    compare(&["-O", "qcow2", "-U", "-l", "snapshot.id=1", &top]);
}

#[test]
fn what_is_measured_is_told_once() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    create(&image, &["-q", "-osize=1M"]);
    refused(1, &["img", "measure"], &["--size"]);
    refused(1, &["img", "measure", "--size=1M", &image], &["either"]);
    refused(
        1,
        &["img", "measure", "-O", "qed", &image],
        &["not measured"],
    );
    refused(1, &["img", "measure", "-l", "s", &image], &["snapshots"]);
    let args = ["img", "measure", "-O", "qcow2", "--size"];
    refused(1, &[&args[..], &["7E"]].concat(), &["too large"]);
    let names = stdout_of(&["img", "measure", "-O", "qcow2", "-o", "help"]);
    assert!(names.lines().any(|name| name == "cluster_size"));
}
