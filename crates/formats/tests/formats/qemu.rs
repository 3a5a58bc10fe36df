//! Images made by QEMU and read by Fathom, and vice versa.

use crate::support::*;
use fathom_formats::Format;
use fathom_formats::offline::check::Repair;
use serde_json::Value;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn has(options: &str, what: &str) -> bool {
    options.contains(what)
}

/// Fills an image with everything that its options allow, using QEMU.
fn fill(dir: &Path, image: &str, format: &str, options: &str) {
    let mut commands = vec![
        "write -P 1 0 300k",
        "write -P 2 1M 64k",
        "write -P 3 7500k 3k",
        "write -z 1100k 200k",
        "write -z -u 256k 128k",
        "discard 1M 32k",
        "write -P 4 6M 1M",
        "discard 6M 512k",
    ];
    if format == "qed" {
        commands.retain(|c| !c.starts_with("discard"));
        commands.retain(|c| !c.starts_with("write -z -u"));
    }
    qemu_io(dir, image, format, &commands);
    let data_file = has(options, "data_file");
    if format == "qcow2" && !data_file {
        let bits = |n: u32| pairs(options).contains(&("refcount_bits", &n.to_string()));
        // Compressed clusters share host clusters, which needs large refcounts. QEMU compresses
        // only into unallocated clusters.
        if [1, 2, 4, 8].into_iter().all(|n| !bits(n)) && !has(options, "preallocation") {
            let compressed = ["write -c -P 9 2M 2M", "write -c -P 8 4M 2M"];
            qemu_io(dir, image, format, &compressed);
        }
        if !bits(1) {
            qemu_img(dir, &["snapshot", "-c", "first", image]);
            qemu_io(dir, image, format, &["write -P 5 100k 1M"]);
            qemu_img(dir, &["snapshot", "-c", "second", image]);
            qemu_io(dir, image, format, &["write -P 6 3M 70k"]);
        }
    }
    if format == "qcow2" && !has(options, "compat=0.10") {
        qemu_img(dir, &["bitmap", "--add", "-g", "512", image, "b0"]);
        qemu_img(dir, &["bitmap", "--add", "--disable", image, "b1"]);
        qemu_io(dir, image, format, &["write -P 7 7M 100k"]);
    }
}

/// Compares the JSON of both tools' check and info commands, field by field.
fn compare(dir: &Path, image: &str, format: &str, options: &str) {
    let fathoms = Format::from_name(format).unwrap();
    let (status, json) = qemu_check(dir, image, format);
    let report = check_file(&dir.join(image), fathoms, Repair::Nothing)
        .unwrap_or_else(|e| panic!("{options}: {e}"));
    assert_eq!(status, 0, "{options}: {json:?}");
    assert_eq!(Some(report.to_json(image, fathoms)), json, "{options}");
    assert_eq!(report.exit_status(), 0);
    assert_eq!(
        info(dir, image).to_json(),
        qemu_info(dir, image),
        "{options}"
    );
    let human = qemu_img(dir, &["info", image]);
    assert_eq!(info(dir, image).to_string(), human, "{options}");
}

#[test]
fn images_made_by_qemu_are_clean_and_described_alike() {
    for (format, all) in [("qcow2", QCOW2), ("qed", QED)] {
        for options in all {
            let dir = dir();
            let dir = dir.path();
            let mut args = vec!["create", "-q", "-f", format];
            if !options.is_empty() {
                args.extend(["-o", options]);
            }
            args.extend(["i", "8M"]);
            qemu_img(dir, &args);
            compare(dir, "i", format, options);
            fill(dir, "i", format, options);
            compare(dir, "i", format, options);
        }
    }
}

#[test]
fn images_made_here_are_clean_and_described_alike() {
    for (format, all) in [("qcow2", QCOW2), ("qed", QED)] {
        for options in all {
            let dir = dir();
            let dir = dir.path();
            create_file(dir, "i", format, &pairs(options), 8 * MIB);
            compare(dir, "i", format, options);
            fill(dir, "i", format, options);
            compare(dir, "i", format, options);
        }
    }
}

/// Keeps the fields that depend on options and not on the layout of the file.
fn essence(mut json: Value) -> Value {
    for field in ["children", "actual-size"] {
        json.as_object_mut().unwrap().remove(field);
    }
    json
}

#[test]
fn images_made_here_are_those_that_qemu_img_makes() {
    for (format, all) in [("qcow2", QCOW2), ("qed", QED)] {
        for options in all {
            for size in ["0", "1000", "8M", "1000M"] {
                if size == "1000M" && (has(options, "full") || has(options, "=512")) {
                    continue;
                }
                let dir = dir();
                let dir = dir.path();
                let mut args = vec!["create", "-q", "-f", format];
                if !options.is_empty() {
                    args.extend(["-o", options]);
                }
                args.extend(["i", size]);
                eprintln!("{format} {options} {size}");
                qemu_img(dir, &args);
                let theirs = qemu_info(dir, "i");
                std::fs::remove_file(dir.join("i")).unwrap();
                create_file(dir, "i", format, &pairs(options), parse_size(size).unwrap());
                compare(dir, "i", format, options);
                let ours = qemu_info(dir, "i");
                assert_eq!(essence(ours), essence(theirs), "{options} {size}");
            }
        }
    }
}

#[test]
fn backing_files_are_described_alike() {
    let dir = dir();
    let dir = dir.path();
    std::fs::create_dir(dir.join("sub")).unwrap();
    qemu_img(dir, &["create", "-q", "-f", "raw", "base", "3M"]);
    qemu_io(dir, "base", "raw", &["write -P 1 0 3M"]);
    let qcow2 = [("backing_file", "../base"), ("backing_fmt", "raw")];
    create_file(dir, "sub/a", "qcow2", &qcow2, 4 * MIB);
    let options = [("backing_file", "a"), ("backing_fmt", "qcow2")];
    create_file(dir, "sub/b", "qed", &options, 5 * MIB);
    let options = [
        ("backing_file", "sub/b"),
        ("backing_fmt", "qed"),
        ("extended_l2", "on"),
        ("preallocation", "metadata"),
    ];
    create_file(dir, "c", "qcow2", &options, 6 * MIB);
    for (image, format) in [("sub/a", "qcow2"), ("sub/b", "qed"), ("c", "qcow2")] {
        compare(dir, image, format, "with a backing file");
        qemu_io(dir, image, format, &["write -P 2 1M 1M", "read -P 1 0 1M"]);
        compare(dir, image, format, "with a backing file and data");
    }
    qemu_io(dir, "c", "qcow2", &["read -P 0 3M 3M", "read -P 1 2M 1M"]);
    let below = dir.join("sub/b");
    let file = std::fs::File::open(&below).expect("the backing file");
    let size = fathom_formats::offline::create::backing_size(&below, &file, Some(Format::Qed));
    assert_eq!(size.unwrap(), 5 * MIB);
}

#[test]
fn encryption_as_of_old_is_refused_by_name() {
    let dir = dir();
    let dir = dir.path();
    let secret = ["--object", "secret,id=s,data=abc", "-q", "-f", "qcow2"];
    for method in ["luks", "aes"] {
        let mut args = vec!["create"];
        args.extend(secret);
        let option = format!("encrypt.format={method},encrypt.key-secret=s");
        args.extend(["-o", &option, "i", "1M"]);
        if method == "luks" {
            args.extend(["-o", "encrypt.iter-time=10"]);
        }
        qemu_img(dir, &args);
        match (
            method,
            check_file(&dir.join("i"), Format::Qcow2, Repair::Nothing),
        ) {
            ("luks", found) => assert_eq!(found.unwrap().exit_status(), 0),
            (_, found) => {
                let error = found.unwrap_err().to_string();
                assert!(error.contains("AES"), "{error}");
            }
        }
        assert_eq!(info(dir, "i").to_json()["encrypted"], true);
    }
}

/// QEMU creates such images and then refuses them: it treats a table whose first cluster is also
/// its last as an overflow.
#[test]
fn qed_tables_may_have_one_cluster() {
    let dir = dir();
    let dir = dir.path();
    create_file(dir, "i", "qed", &pairs("table_size=1,cluster_size=4k"), MIB);
    let options = [
        "create",
        "-q",
        "-f",
        "qed",
        "-o",
        "table_size=1,cluster_size=4k",
    ];
    qemu_img(dir, &[&options[..], &["j", "1M"]].concat());
    let read = |name: &str| std::fs::read(dir.join(name)).unwrap();
    assert_eq!(read("i"), read("j"));
    let report = check_file(&dir.join("i"), Format::Qed, Repair::Nothing).unwrap();
    assert_eq!(report.exit_status(), 0);
}

#[test]
fn a_dirty_image_is_clean_after_a_repair() {
    let dir = dir();
    let dir = dir.path();
    create_file(dir, "i", "qcow2", &pairs("lazy_refcounts=on"), 8 * MIB);
    // The image is not closed, so refcounts are not written.
    run(
        dir,
        "qemu-io",
        &["-f", "qcow2", "-c", "write 0 1M", "-c", "abort", "i"],
    );
    assert!(info(dir, "i").is_dirty());
    let path = dir.join("i");
    let (status, _) = qemu_check(dir, "i", "qcow2");
    let report = check_file(&path, Format::Qcow2, Repair::Nothing).unwrap();
    assert_eq!((status, report.exit_status()), (2, 2));
    let report = check_file(&path, Format::Qcow2, Repair::All).unwrap();
    assert_eq!(report.exit_status(), 0);
    compare(dir, "i", "qcow2", "repaired");
    assert!(!info(dir, "i").is_dirty());
    qemu_io(dir, "i", "qcow2", &["read -P 0xcd 0 1M"]);
}
