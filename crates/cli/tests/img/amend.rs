//! Compares `fathom img amend` with qemu-img.

use crate::pair::Pair;
use crate::place::Place;
use crate::support::{refused, stdout_of};
use crate::{create, qemu_img, qemu_json};
use serde_json::Value;
use std::fs;

/// Returns the properties of a qcow2 image that are specific to the format.
fn features(path: &str) -> Value {
    qemu_json(&["info", "--output=json", path])["format-specific"]["data"].clone()
}

#[test]
fn options_become_what_qemu_makes_of_them() {
    let ways: [(&str, &[&str]); 6] = [
        (
            "compat=0.10,cluster_size=4k",
            &[
                "compat=1.1",
                "compat=v3,lazy_refcounts=on",
                "lazy_refcounts=off",
                "refcount_bits=64",
            ],
        ),
        (
            "cluster_size=512",
            &[
                "refcount_bits=1",
                "refcount_bits=8",
                "refcount_bits=64",
                "refcount_bits=2",
            ],
        ),
        (
            "refcount_bits=32,lazy_refcounts=on",
            &["compat=0.10,refcount_bits=16", "compat=1.1"],
        ),
        (
            "extended_l2=on,cluster_size=16k",
            &["lazy_refcounts=on,refcount_bits=4"],
        ),
        (
            "cluster_size=64k",
            &["compat=0.10", "compat=0.10,lazy_refcounts=off"],
        ),
        (
            "cluster_size=1k,backing_file=base,backing_fmt=raw",
            &["compat=0.10", "compat=1.1,refcount_bits=8"],
        ),
    ];
    for (made, amends) in ways {
        let pair = Pair::new(made, false);
        // With the smallest clusters, the refcount table has to grow.
        pair.io(&["write -P 1 0 2M", "write -P 2 1300k 5k"]);
        for options in amends {
            pair.both(&["amend", "-f", "qcow2", "-o", options, "{}"]);
            assert_eq!(
                features(&pair.path(0)),
                features(&pair.path(1)),
                "{made} {options}"
            );
            pair.io(&["write -P 3 100k 90k", "read -P 1 0 100k"]);
        }
    }
}

/// Removes the extra data of the first snapshot, which version 3 requires.
fn as_before_2012(path: &str) {
    let mut bytes = fs::read(path).unwrap();
    let number = |bytes: &[u8], at: usize, len: usize| {
        let field = &bytes[at..at + len];
        field.iter().fold(0, |n, byte| n << 8 | usize::from(*byte))
    };
    let entry = number(&bytes, 64, 8);
    let (extra, names) = (number(&bytes, entry + 36, 4), entry + 40);
    assert!(extra >= 16);
    bytes.resize(bytes.len() + 64, 0);
    bytes[entry + 36..names].fill(0);
    bytes.copy_within(names + extra..names + extra + 64, names);
    fs::write(path, bytes).unwrap();
}

#[test]
fn snapshots_stay_what_they_are() {
    let pair = Pair::new("compat=0.10,cluster_size=4k", false);
    pair.io(&["write -P 1 0 700k"]);
    let before = pair.disk(0, None);
    for which in [0, 1] {
        qemu_img(&["snapshot", "-c", "s", &pair.path(which)]);
        as_before_2012(&pair.path(which));
    }
    pair.io(&["write -P 2 10k 700k"]);
    for options in [
        "compat=1.1",
        "refcount_bits=2",
        "compat=0.10,refcount_bits=16",
    ] {
        pair.both(&["amend", "-f", "qcow2", "-o", options, "{}"]);
        pair.snapshot_is("s", &before);
    }
}

#[test]
fn what_cannot_be_is_told_and_changes_nothing() {
    let place = Place::new();
    let image = place.path("image");
    create(
        &image,
        &["-q", "-f", "qcow2", "-o", "cluster_size=64k,size=20M"],
    );
    place.write("image", "qcow2", &["write -P 1 0 1M", "write -z 2M 1M"]);
    for _ in 0..2 {
        stdout_of(&["img", "snapshot", "-c", "s", &image]);
    }
    let before = fs::read(&image).unwrap();
    let raw = place.path("raw");
    fs::write(&raw, [0; 512]).unwrap();
    let cases: [(&str, &str, &[&str]); 10] = [
        (
            &image,
            "compat=0.10",
            &["image: ", "16 clusters", "convert"],
        ),
        (
            &image,
            "refcount_bits=1",
            &["image: ", "3 references", "1 bits"],
        ),
        (&image, "refcount_bits=3", &["power of two"]),
        (
            &image,
            "compat=0.10,lazy_refcounts=on",
            &["needs compat=1.1"],
        ),
        (&image, "compat=2", &["compat: '2' is not one of"]),
        (&image, "size=1G", &["fathom img resize"]),
        (
            &image,
            "cluster_size=4k",
            &["'cluster_size' cannot be changed"],
        ),
        (&image, "data_file=x", &["'data_file' cannot be changed"]),
        (&image, "backing_file=below", &["fathom img rebase"]),
        (&raw, "compat=1.1", &["raw: a raw image, and only qcow2"]),
    ];
    for (path, options, words) in cases {
        refused(1, &["img", "amend", "-o", options, path], words);
        assert!(fs::read(&image).unwrap() == before, "{options}");
    }
    assert!(stdout_of(&["img", "amend", "-o", "help"]).contains("refcount_bits=N "));
    stdout_of(&["img", "bitmap", "--add", &image, "b"]);
    refused(
        1,
        &["img", "amend", "-o", "compat=0.10", &image],
        &["bitmaps"],
    );
    place.sound("qcow2", &image);
}
