//! Checks that `fathom img measure` prints the same as `qemu-img measure`, or more where that is
//! too little.

use crate::pair::{io, sample};
use crate::place::{MIB, Place};
use crate::support::loop_device::Loop;
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

/// Cluster sizes for which the refcount table may become longer while an image is written, as for
/// large images. QEMU does not count this.
const SMALL: &[&str] = &["cluster_size=512", "cluster_size=1k", "cluster_size=4k"];

/// Asserts that both tools print the same for programs and for people, or both fail.
///
/// Fathom reports slightly more for small clusters and for bitmaps.
fn compare(args: &[&str]) {
    let both = |output: &str| {
        let args = [&["measure", output], args].concat();
        let mine = run(&[&["img"], &args[..]].concat());
        let theirs = Command::new("qemu-img").args(&args).output();
        let theirs = theirs.expect("qemu-img is installed by `make setup`");
        assert_eq!(mine.status.code(), theirs.status.code(), "{args:?}");
        (mine.stdout, theirs.stdout)
    };
    let (mine, theirs) = both("--output=json");
    let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
    let (Some(mine), Some(theirs)) = (json(&mine), json(&theirs)) else {
        assert_eq!(mine, theirs, "{args:?}");
        return;
    };
    let is_small = args
        .iter()
        .any(|arg| SMALL.iter().any(|small| arg.contains(small)));
    let fields = |value: &Value| {
        value
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect::<Vec<_>>()
    };
    assert_eq!(fields(&mine), fields(&theirs), "{args:?}");
    let full = theirs["fully-allocated"].as_u64().unwrap();
    let is_large = full > 256 << 30;
    for field in fields(&mine) {
        let number = |value: &Value| value[&field].as_u64().unwrap();
        let (mine, theirs) = (number(&mine), number(&theirs));
        let more = match &*field {
            "bitmaps" if theirs > 0 => 16 * (2 << 20),
            _ if is_small || is_large => theirs / 100,
            _ => 0,
        };
        let allowed = theirs..=theirs + more;
        assert!(
            allowed.contains(&mine),
            "{args:?}: {field}: {mine} {theirs}"
        );
    }
    if mine == theirs {
        let (mine, theirs) = both("--output=human");
        assert_eq!(mine, theirs, "{args:?}");
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
    refused(1, &["img", "measure", "--size=1M", &image], &["both given"]);
    refused(
        1,
        &["img", "measure", "-O", "qed", &image],
        &["cannot be measured"],
    );
    refused(1, &["img", "measure", "-l", "s", &image], &["snapshots"]);
    let args = ["img", "measure", "-O", "qcow2", "--size"];
    refused(1, &[&args[..], &["7E"]].concat(), &["exceeds the limit"]);
    let names = stdout_of(&["img", "measure", "-O", "qcow2", "-o", "help"]);
    assert!(
        names
            .lines()
            .any(|line| line.starts_with("cluster_size=SIZE "))
    );
}

/// Options of images whose refcount tables grow, some of them several times.
const GROWING: &[&str] = &[
    "cluster_size=512",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=1k,refcount_bits=64",
    "cluster_size=512,refcount_bits=1",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=64k",
    "cluster_size=2M",
    "cluster_size=16k,extended_l2=on",
];

/// Returns the measured size in bytes of a copy of an image, including its bitmaps.
fn needed(options: &[&str], image: &str) -> u64 {
    let args = ["img", "measure", "-O", "qcow2", "--output=json"];
    let said = stdout_of(&[&args[..], options, &[image]].concat());
    let said: Value = serde_json::from_str(&said).unwrap();
    let number = |name: &str| said[name].as_u64().unwrap_or(0);
    assert!(number("required") <= number("fully-allocated"), "{said}");
    number("required") + number("bitmaps")
}

/// Creates incompressible images: a full one, one with holes, and one with bitmaps.
fn images(place: &Place) -> Vec<(String, bool)> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..9 * (MIB / 8)).flat_map(|_| random()).collect();
    let (full, part, bitmaps) = (
        place.path("full"),
        place.path("part"),
        place.path("bitmaps"),
    );
    std::fs::write(&full, &bytes).unwrap();
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &full, &bitmaps]);
    for granularity in ["512", "64k"] {
        qemu_img(&["bitmap", "--add", "-g", granularity, &bitmaps, granularity]);
    }
    io(
        &bitmaps,
        "qcow2",
        &["write -P 7 0 5M", "write -P 8 6000k 3M"],
    );
    for hole in bytes.chunks_mut(256 << 10) {
        hole[..200 << 10].fill(0);
    }
    std::fs::write(&part, &bytes).unwrap();
    vec![(full, false), (part, false), (bitmaps, true)]
}

#[test]
fn copies_need_no_more_than_is_measured() {
    let place = Place::new();
    let copy = place.path("copy");
    for (image, has_bitmaps) in images(&place) {
        for options in GROWING {
            if has_bitmaps && options.contains("refcount_bits=1") {
                continue;
            }
            for how in [&[][..], &["-c"], &["-m", "1"]] {
                let options = ["-o", options];
                let needed = needed(&options, &image);
                let mut args = vec!["img", "convert", "-O", "qcow2"];
                args.extend(options);
                args.extend(how);
                args.extend(has_bitmaps.then_some("--bitmaps"));
                args.extend([&*image, &copy]);
                stdout_of(&args);
                let len = std::fs::metadata(&copy).unwrap().len();
                assert!(len <= needed, "{args:?}: {len} bytes, measured {needed}");
                place.sound("qcow2", &copy);
                std::fs::remove_file(&copy).unwrap();
            }
        }
    }
}

/// No byte is written behind the end of a device, not even temporarily.
#[test]
#[ignore = "needs root: loop devices"]
fn copies_fit_on_devices_of_the_measured_size() {
    let place = Place::new();
    for (image, has_bitmaps) in images(&place) {
        for options in GROWING {
            let options = ["-o", options];
            let file = place.path("device");
            let needed = needed(&options, &image);
            std::fs::write(&file, vec![0xee; needed as usize]).unwrap();
            let device = Loop::of(file.as_ref());
            let mut args = vec!["img", "convert", "-O", "qcow2"];
            args.extend(options);
            args.extend(has_bitmaps.then_some("--bitmaps"));
            args.extend([&*image, &device.0]);
            stdout_of(&args);
            qemu_img(&["compare", &image, &device.0]);
        }
    }
}
