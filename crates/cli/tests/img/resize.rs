//! Compares `fathom img resize` with `qemu-img resize`.

use crate::pair::{Pair, io, sample};
use crate::snapshot::abandon;
use crate::support::{as_arg, disk_dir, refused, short_dir, stdout_of};
use crate::{create, qemu_img};
use serde_json::Value;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

const IMAGES: &[&str] = &[
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=16k,extended_l2=on",
    "compat=0.10,cluster_size=512",
    "cluster_size=1k,refcount_bits=64",
    "cluster_size=4k,refcount_bits=1,lazy_refcounts=on",
    "cluster_size=32k,extended_l2=on,refcount_bits=32,compression_type=zstd",
    "cluster_size=2M",
    "compat=0.10",
    "preallocation=metadata",
];

/// The sizes to which a disk of 2 MiB is resized, in one step or several.
const SIZES: &[&[&str]] = &[
    &["1M", "5M"],
    &["1500160", "+3M"],
    &["-1000k", "1100k", "40M"],
    &["600M", "700000256", "2M"],
];

/// Returns the expected contents of a disk after a resize.
fn resized(mut disk: Vec<u8>, size: u64) -> Vec<u8> {
    disk.resize(size as usize, 0);
    disk
}

fn check(path: &str) -> Value {
    let said = qemu_img(&["check", "--output=json", path]);
    serde_json::from_str(&said).expect("JSON")
}

fn size_of(text: &str, old: u64) -> u64 {
    let digits = text
        .trim_start_matches(['+', '-'])
        .trim_end_matches(['k', 'M']);
    let unit = match text.as_bytes()[text.len() - 1] {
        b'k' => 1 << 10,
        b'M' => 1 << 20,
        _ => 1,
    };
    let size: u64 = digits.parse::<u64>().expect("a number") * unit;
    match text.as_bytes()[0] {
        b'+' => old + size,
        b'-' => old - size,
        _ => size,
    }
}

#[test]
fn disks_grow_by_zeroes_and_shrink_as_by_qemu_img() {
    let plain = sample(IMAGES, 3).iter().map(|options| (*options, false));
    for (options, compressed) in plain.chain([("cluster_size=64k", true)]) {
        for sizes in sample(SIZES, 3) {
            let pair = Pair::new(options, compressed);
            if !compressed {
                io(&pair.path(0), "qcow2", &["write -P 7 0 2M"]);
            }
            let mut disk = pair.disk(0, None);
            for size in *sizes {
                let new = size_of(size, disk.len() as u64);
                stdout_of(&["img", "resize", "--shrink", &pair.path(0), size]);
                disk = resized(disk, new);
                assert!(pair.disk(0, None) == disk, "{options} {sizes:?} {size}");
                let report = check(&pair.path(0));
                // No cluster beyond the end is left.
                let (used, total) = (&report["allocated-clusters"], &report["total-clusters"]);
                assert!(used.as_u64() <= total.as_u64(), "{options}: {report}");
            }
            // QEMU can write to the image.
            io(&pair.path(0), "qcow2", &["write -P 8 100k 900k"]);
            check(&pair.path(0));
        }
    }
}

#[test]
fn snapshots_stay_when_the_disk_is_resized() {
    // Sizes are whole clusters, because QEMU would expose the old rest of a partial one.
    for options in sample(&["cluster_size=4k", "cluster_size=16k,extended_l2=on"], 2) {
        let pair = Pair::new(options, false);
        pair.io(&["write -P 1 0 2M"]);
        pair.both(&["snapshot", "-c", "s"]);
        let disk = pair.disk(0, None);
        for size in ["1M", "3M", "896k", "20M"] {
            pair.both(&["resize", "-q", "--shrink", "{}", size]);
            let kept = pair.disk(0, Some("s"));
            let there = kept.len().min(disk.len());
            assert!(kept[..there] == disk[..there], "{options} {size}");
        }
        pair.both(&["snapshot", "-a", "s"]);
        assert!(pair.disk(0, None) == disk);
    }
}

/// The backing file has 5 MiB of data, none of it zeroes.
#[test]
fn what_is_below_does_not_come_into_sight() {
    let kinds = [
        "backing_file=base,backing_fmt=raw",
        "backing_file=base.qcow2,backing_fmt=qcow2,cluster_size=2M",
        "backing_file=base,backing_fmt=raw,cluster_size=16k,extended_l2=on",
        "backing_file=base.qcow2,backing_fmt=qcow2,cluster_size=32k,extended_l2=on",
        "backing_file=base,backing_fmt=raw,cluster_size=512",
    ];
    for options in sample(&kinds, 3) {
        for (first, then) in [
            ("1M", "3M"),
            ("1000448", "6M"),
            ("5M", "9M"),
            ("700k", "717312"),
        ] {
            let pair = Pair::new(options, false);
            io(&pair.path(0), "qcow2", &["write -P 1 0 3000"]);
            let old = size_of(first, 0);
            stdout_of(&["img", "resize", "-q", "--shrink", &pair.path(0), first]);
            let disk = pair.disk(0, None);
            assert_eq!(disk.len() as u64, old);
            stdout_of(&["img", "resize", "-q", &pair.path(0), then]);
            let expected = resized(disk, size_of(then, 0));
            assert!(pair.disk(0, None) == expected, "{options} {first} {then}");
            check(&pair.path(0));
        }
    }
}

#[test]
fn what_is_new_is_allocated_as_the_user_wants_it() {
    let options = [
        "cluster_size=64k",
        "cluster_size=16k,extended_l2=on",
        "cluster_size=512",
    ];
    for options in sample(&options, 3) {
        for mode in ["off", "metadata", "falloc", "full"] {
            let pair = Pair::new(options, false);
            io(&pair.path(0), "qcow2", &["write -P 1 0 2M"]);
            stdout_of(&["img", "resize", "-q", "--shrink", &pair.path(0), "1000k"]);
            let disk = pair.disk(0, None);
            let preallocation = format!("--preallocation={mode}");
            let space = |path: &str| std::fs::metadata(path).expect("the image").blocks() * 512;
            let before = space(&pair.path(0));
            stdout_of(&["img", "resize", &preallocation, &pair.path(0), "9M"]);
            assert!(
                pair.disk(0, None) == resized(disk, 9 << 20),
                "{options} {mode}"
            );
            let report = check(&pair.path(0));
            let all = report["allocated-clusters"] == report["total-clusters"];
            assert_eq!(all, mode != "off", "{options} {mode}: {report}");
            let taken = space(&pair.path(0)).saturating_sub(before);
            let takes = ["falloc", "full"].contains(&mode);
            // The file system may need fewer blocks for its metadata of the file.
            let most = (8 << 20) - (64 << 10);
            assert_eq!(taken >= most, takes, "{options} {mode}: {taken}");
        }
    }
}

#[test]
fn raw_and_qed_images_are_resized_as_by_qemu_img() {
    for format in ["raw", "qed"] {
        let dir = disk_dir();
        let paths = ["a", "b"].map(|name| as_arg(&dir.path().join(name)));
        for path in &paths {
            create(path, &["-q", "-f", format, "-o", "size=1000448"]);
            io(path, format, &["write -P 1 0 1000448"]);
        }
        let sizes = match format {
            "raw" => &["+1M", "700k", "700001", "+5M"][..],
            _ => &["+1M", "40M"],
        };
        for size in sizes {
            let [mine, theirs] = &paths;
            let args = ["resize", "-f", format, "--shrink"];
            let said = stdout_of(&[&["img"], &args[..], &[mine, size]].concat());
            assert_eq!(said, qemu_img(&[&args[..], &[theirs, size]].concat()));
            qemu_img(&["compare", "-s", "-f", format, "-F", format, mine, theirs]);
            let len = |path| std::fs::metadata(path).expect("an image").len();
            assert_eq!(len(mine), len(theirs), "{format} {size}");
        }
    }
    let dir = disk_dir();
    let raw = as_arg(&dir.path().join("raw"));
    create(&raw, &["-q", "-o", "size=1M"]);
    let said = stdout_of(&[
        "img",
        "resize",
        "--preallocation=full",
        "--json",
        &raw,
        "3M",
    ]);
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["old-virtual-size"], 1 << 20);
    assert_eq!(said["virtual-size"], 3 << 20);
    let blocks = std::fs::metadata(&raw).expect("the image").blocks();
    assert!(blocks * 512 >= 2 << 20, "{blocks}");
}

/// A QED header only records whether the backing file is raw.
#[test]
fn a_qed_image_on_an_image_is_resized() {
    for below in ["qcow2", "qed"] {
        let dir = disk_dir();
        let path = |name: &str| as_arg(&dir.path().join(name));
        let (base, top, raw) = (path("base"), path("top"), path("raw"));
        create(&base, &["-q", "-f", below, "-o", "size=1M"]);
        io(&base, below, &["write -P 1 0 1M"]);
        create(&top, &["-q", "-f", "qed", "-b", "base", "-F", below]);
        stdout_of(&["img", "resize", "-f", "qed", &top, "+1M"]);
        qemu_img(&["convert", "-f", "qed", "-O", "raw", &top, &raw]);
        let disk = resized(vec![1; 1 << 20], 2 << 20);
        assert!(std::fs::read(&raw).unwrap() == disk, "{below}");
    }
}

#[test]
fn a_qed_image_that_was_not_closed_is_repaired_first() {
    let dir = disk_dir();
    let path = as_arg(&dir.path().join("i"));
    create(&path, &["-q", "-f", "qed", "-o", "size=1M"]);
    abandon(&path, "qed");
    stdout_of(&["img", "resize", "-f", "qed", &path, "9M"]);
    check(&path);
    let info = qemu_img(&["info", &path]);
    assert!(
        info.contains("9 MiB") && !info.contains("cleanly shut down: no"),
        "{info}"
    );
}

#[test]
fn data_files_are_resized_with_their_images() {
    for raw in ["off", "on"] {
        let dir = disk_dir();
        let (image, data) = (dir.path().join("i"), dir.path().join("d"));
        let image = as_arg(&image);
        // QEMU resolves a relative name in its working directory.
        let options = format!("size=2M,data_file={},data_file_raw={raw}", as_arg(&data));
        create(&image, &["-q", "-f", "qcow2", "-o", &options]);
        io(&image, "qcow2", &["write -P 1 0 2M"]);
        for (size, bytes) in [("1000448", 1_000_448), ("4M", 4 << 20), ("100k", 100 << 10)] {
            // Data that was appended behind the disk's end appears on a grown disk only if the data
            // file is raw.
            let mut file = std::fs::OpenOptions::new().append(true).open(&data);
            let file = file.as_mut().expect("the data file");
            file.write_all(&[0xee; 100_000]).expect("more");
            let named = ["--data-file", &as_arg(&data)];
            stdout_of(&[&["img", "resize", "--shrink"], &named[..], &[&image, size]].concat());
            let read = std::fs::read(&data).expect("the data file");
            assert_eq!(read.len(), bytes);
            let end = bytes.min(1_000_448);
            let kept = if raw == "on" {
                read.len().min(end + 100_000)
            } else {
                end
            };
            assert!(read[..end].iter().all(|b| *b == 1));
            assert!(read[end..kept].iter().all(|b| *b == 0xee));
            assert!(read[kept..].iter().all(|b| *b == 0));
            qemu_img(&[
                "compare",
                "-f",
                "raw",
                "-F",
                "qcow2",
                &as_arg(&data),
                &image,
            ]);
            check(&image);
        }
    }
}

/// A raw data file that is larger than the disk keeps its data, as with QEMU.
#[test]
fn a_raw_data_file_that_is_larger_already_keeps_what_it_has() {
    for mode in ["off", "metadata", "falloc", "full"] {
        for size in ["2M", "3000320", "5M"] {
            let dir = disk_dir();
            let path = |name: &str| as_arg(&dir.path().join(name));
            let (mine, theirs) = ([path("a"), path("b")], [path("c"), path("d")]);
            for [image, data] in [&mine, &theirs] {
                let option = format!("data_file={data},data_file_raw=on");
                qemu_img(&[
                    "create", "-q", "-f", "qcow2", "-o", &option, image, "1000448",
                ]);
                std::fs::write(data, vec![0x77; 3 << 20]).expect("more");
            }
            let how = format!("--preallocation={mode}");
            let [image, data] = &mine;
            stdout_of(&["img", "resize", &how, "--data-file", data, image, size]);
            qemu_img(&["resize", "-q", &how, &theirs[0], size]);
            qemu_img(&["compare", image, &theirs[0]]);
            let read = std::fs::read(data).expect("the data file");
            assert!(read[..3 << 20].iter().all(|b| *b == 0x77), "{mode} {size}");
            assert!(read[3 << 20..].iter().all(|b| *b == 0), "{mode} {size}");
            check(image);
        }
    }
}

/// Returns the dirty ranges that QEMU reports.
fn dirty(image: &str, bitmap: &str) -> Value {
    let dir = short_dir();
    let socket = as_arg(&dir.path().join("s"));
    // The server ends some time after its client, so it gets a copy.
    let copy = as_arg(&dir.path().join("i"));
    std::fs::copy(image, &copy).expect("a copy");
    let server = Command::new("qemu-nbd")
        .args([
            "--fork", "-r", "-f", "qcow2", "-B", bitmap, "-k", &socket, &copy,
        ])
        .status();
    assert!(
        server
            .expect("qemu-nbd is installed by `make setup`")
            .success()
    );
    let options = format!(
        "driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}"
    );
    let said = qemu_img(&["map", "--output=json", "--image-opts", &options]);
    serde_json::from_str(&said).expect("JSON")
}

#[test]
fn bitmaps_are_resized_with_their_disks() {
    for options in sample(&["cluster_size=512", "cluster_size=64k"], 2) {
        let pair = Pair::new(options, false);
        for which in [0, 1] {
            let path = pair.path(which);
            qemu_img(&["bitmap", "--add", "-g", "512", &path, "fine"]);
            qemu_img(&["bitmap", "--add", "-g", "1M", &path, "coarse"]);
            qemu_img(&["bitmap", "--add", "--disable", &path, "old"]);
        }
        pair.io(&["write -P 1 100k 900k", "write -P 2 1500k 500k"]);
        for size in ["3M", "1M", "+512k", "20M", "1M"] {
            pair.both(&["resize", "-q", "--shrink", "{}", size]);
            for bitmap in ["fine", "coarse", "old"] {
                let [mine, theirs] = [0, 1].map(|which| dirty(&pair.path(which), bitmap));
                assert_eq!(mine, theirs, "{options} {size} {bitmap}");
            }
            pair.io(&["write -P 3 700k 100k"]);
        }
    }
}

/// Leaves bitmaps in the state in which a killed process leaves them.
fn abandon_bitmaps(image: &str) {
    let args = ["-c", "write 0 1", "-c", "abort", image];
    let output = Command::new("qemu-io").args(args).output();
    assert!(!output.expect("qemu-io").status.success());
}

#[test]
fn what_cannot_be_is_told() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let made = |name: &str, format: &str, options: &str| {
        create(&path(name), &["-q", "-f", format, "-o", options]);
    };
    made("raw", "raw", "size=4M");
    made("i", "qcow2", "size=1M,cluster_size=512");
    made("old", "qcow2", "size=1M,compat=0.10");
    made("bits", "qcow2", "size=1M");
    made("qed", "qed", "size=1M,cluster_size=4k,table_size=1");
    made("above", "qed", "size=1M,backing_file=raw,backing_fmt=raw");
    made(
        "old-above",
        "qcow2",
        "size=1M,compat=0.10,backing_file=raw,backing_fmt=raw",
    );
    qemu_img(&["bitmap", "--add", &path("bits"), "b"]);
    // A program that has the image open marks its bitmaps as in use.
    abandon_bitmaps(&path("bits"));
    qemu_img(&["snapshot", "-c", "s", &path("old")]);
    for (name, args, words) in [
        ("i", &["500k"][..], "--shrink"),
        ("i", &["-1"], "--shrink"),
        ("i", &["0"], "not from 1 byte"),
        ("i", &["-2M"], "not from 1 byte"),
        ("i", &["1000001", "--shrink"], "multiple of 512"),
        ("i", &["1T"], "L1 table"),
        ("i", &["--preallocation=full", "1M"], "that grows"),
        ("old", &["2M"], "version 2 that has snapshots"),
        ("old-above", &["2M"], "compat=1.1"),
        ("bits", &["2M"], "not closed cleanly"),
        ("qed", &["500k", "--shrink"], "cannot shrink"),
        ("qed", &["2G"], "its tables reach"),
        (
            "qed",
            &["2M", "--preallocation=falloc"],
            "preallocation: not possible",
        ),
        ("qed", &["2000001"], "multiple of 512"),
        ("above", &["2M"], "backing file"),
        ("raw", &["9M", "--preallocation=metadata"], "no metadata"),
        ("gone", &["9M"], "no such file"),
    ] {
        let before = std::fs::read(path(name)).ok();
        refused(
            1,
            &[&["img", "resize", &path(name)], args].concat(),
            &[words],
        );
        assert!(
            std::fs::read(path(name)).ok() == before,
            "{name} was changed"
        );
    }
    refused(2, &["img", "resize", &path("i"), "viel"], &["viel"]);
    refused(2, &["img", "resize", &path("i")], &["SIZE"]);
    // Only files that the user allows are opened.
    std::fs::create_dir(path("sub")).expect("a directory");
    let above = path("sub/above");
    let options = format!("size=1M,backing_file={},backing_fmt=raw", path("raw"));
    create(&above, &["-q", "-f", "qcow2", "-o", &options]);
    refused(1, &["img", "resize", &above, "2M"], &["--allow-dir"]);
    let allowed = as_arg(dir.path());
    stdout_of(&["img", "resize", "--allow-dir", &allowed, &above, "2M"]);
}
