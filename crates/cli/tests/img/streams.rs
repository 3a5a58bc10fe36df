//! Tests images that are written sequentially, with qemu-img as the reference.

use crate::place::{Place, raw};
use crate::support::{fathom, refused, run, stdout_of};
use crate::{qemu_img, qemu_json};
use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

/// Converts to a pipe, and saves the output in a file.
fn piped(place: &Place, args: &[&str], source: &str) -> String {
    let output = run(&[&["img", "convert", "-O", "qcow2"], args, &[source, "-"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {said}");
    let image = place.path("piped");
    let len = output.stdout.len() as u64;
    fs::write(&image, output.stdout).unwrap();
    let cluster = qemu_json(&["info", "--output=json", &image])["cluster-size"].as_u64();
    assert!(len.is_multiple_of(cluster.unwrap()), "{args:?}: {len}");
    image
}

const OPTIONS: &[&str] = &[
    "cluster_size=64k",
    "cluster_size=512,compat=0.10",
    "cluster_size=2M",
    "extended_l2=on,cluster_size=16k",
    "cluster_size=4k,refcount_bits=1",
    "cluster_size=1k,refcount_bits=64",
    "size=100M,lazy_refcounts=on",
    "size=12586496",
    "size=13000001",
];

#[test]
fn a_qcow2_image_goes_through_a_pipe() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let image = place.path("image");
    let small = ["-c", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k"];
    qemu_img(&[&["convert"], &small[..], &[&disk, &image]].concat());
    for options in OPTIONS {
        for (format, source) in [("raw", &disk), ("qcow2", &image)] {
            let image = piped(&place, &["-f", format, "-o", options], source);
            // The check also treats a leaked cluster as an error.
            place.sound("qcow2", &image);
            place.same("qcow2", &image, &disk);
        }
    }
}

#[test]
fn disks_of_every_shape_go_through_a_pipe() {
    let place = Place::new();
    let mut state = 0x5eed_u64;
    let mut below = |most: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % most
    };
    let rounds = std::env::var("FATHOM_ROUNDS").ok();
    let rounds = rounds.and_then(|n| n.parse().ok()).unwrap_or(6);
    for _ in 0..rounds {
        let disk = place.path("disk");
        let size = (1 + below(60_000)) * 512;
        let file = fs::File::create(&disk).unwrap();
        file.set_len(size).unwrap();
        for _ in 0..below(30) {
            let at = below(size);
            let len = (1 + below(200_000)).min(size - at);
            file.write_all_at(&vec![1 + below(255) as u8; len as usize], at)
                .unwrap();
        }
        let options = format!("cluster_size={}", 512 << below(13));
        let image = piped(&place, &["-f", "raw", "-o", &options], &disk);
        qemu_img(&["check", "-q", "-f", "qcow2", &image]);
        place.same("qcow2", &image, &disk);
    }
}

/// Only the data of the source itself is copied, not that of its base image.
#[test]
fn an_image_on_a_base_goes_through_a_pipe() {
    for options in [
        "cluster_size=64k",
        "cluster_size=4k",
        "cluster_size=1M",
        "compat=0.10",
        "extended_l2=on",
    ] {
        let place = Place::new();
        let (base, top) = place.chain("qcow2");
        // Only a part of a larger cluster is zeroes; the base image has data around that part.
        place.write("top", "qcow2", &["write -z 512k 64k"]);
        let before = place.path("before");
        qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &top, &before]);
        let args = ["-B", &base, "-F", "qcow2", "-o", options];
        let image = piped(&place, &args, &top);
        place.sound("qcow2", &image);
        place.same("qcow2", &image, &before);
        let len = fs::metadata(&image).unwrap().len();
        let whole = piped(&place, &["-o", options], &top);
        place.sound("qcow2", &whole);
        place.same("qcow2", &whole, &before);
        assert!(fs::metadata(&whole).unwrap().len() > len);
    }
}

#[test]
fn what_cannot_seek_is_a_target() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let pipe = place.path("pipe");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let mut writer = fathom()
        .args(["img", "convert", "--to-stream", "-O", "qcow2", &disk, &pipe])
        .spawn()
        .unwrap();
    let mut image = Vec::new();
    fs::File::open(&pipe)
        .unwrap()
        .read_to_end(&mut image)
        .unwrap();
    assert!(writer.wait().unwrap().success());
    let copy = place.path("copy");
    fs::write(&copy, image).unwrap();
    place.same("qcow2", &copy, &disk);

    let to = |target: &str, args: &[&str], words: &[&str]| {
        let command = [
            &["img", "convert", "--to-stream", "-O", "qcow2"],
            args,
            &[&disk, target],
        ];
        refused(1, &command.concat(), words);
    };
    to(&copy, &[], &["copy: ", "needs no --to-stream"]);
    to(&place.path("none"), &[], &["none: cannot open the file"]);
    to("-", &["--json"], &["--json"]);
    to("-", &["-c"], &["omit -c"]);
    to("-", &["-n"], &["omit -n"]);
    to("-", &["--salvage"], &["omit --bitmaps and --salvage"]);
    to(
        "-",
        &["-o", "preallocation=falloc"],
        &["omit preallocation"],
    );
    to("-", &["-o", "data_file=x"], &["data file"]);
    to("-", &["-o", "size=1M"], &["-o size is smaller"]);
    to("-", &["-B", &copy], &["-F"]);
    refused(
        2,
        &["img", "convert", "-r", "0", &disk, "-"],
        &["0 bytes a second"],
    );
    to(
        "-",
        &["-B", &copy, "-F", "qcow2", "-o", "size=100M"],
        &["omit -o size"],
    );
    refused(
        1,
        &["img", "convert", "-o", "size=100M", &disk, "-"],
        &["omit -o"],
    );
    to("-", &[&disk], &["-O raw"]);
    refused(
        1,
        &["img", "convert", "-O", "qed", &disk, "-"],
        &["-O qcow2"],
    );
    place.same("qcow2", &copy, &disk);
}

#[test]
fn a_reader_that_goes_away_is_told() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    for format in ["raw", "qcow2"] {
        let mut writer = fathom()
            .args(["img", "convert", "-O", format, &disk, "-"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(writer.stdout.take());
        let output = writer.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("standard output: cannot write"), "{said}");
    }
}

/// Operands are counted as by coreutils' dd. qemu-img does so if either `skip` or `count` is given.
#[test]
fn a_part_is_copied() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let whole = fs::read(&disk).unwrap();
    let image = place.path("image");
    let small = ["-c", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k"];
    qemu_img(&[&["convert"], &small[..], &[&disk, &image]].concat());
    let (from_disk, from_image) = (format!("if={disk}"), format!("if={image}"));
    let (mine, theirs) = (place.path("mine"), place.path("theirs"));
    let (to_mine, to_theirs) = (format!("of={mine}"), format!("of={theirs}"));
    for (format, source) in [("raw", &from_disk), ("qcow2", &from_image)] {
        for (operands, part) in [
            (&[][..], 0..whole.len()),
            (&["skip=1"], 512..whole.len()),
            (&["bs=1M", "count=3"], 0..3 << 20),
            (&["bs=64k", "skip=47"], 47 << 16..whole.len()),
            (&["bs=1M", "count=99"], 0..whole.len()),
            (
                &["bs=1536", "skip=2001", "count=3001"],
                2001 * 1536..5002 * 1536,
            ),
            (&["bs=1M", "count=1", "skip=8"], 8 << 20..9 << 20),
            (&["bs=8M", "count=1", "skip=1"], 8 << 20..whole.len()),
        ] {
            for target in ["raw", "qcow2"] {
                let args = ["img", "dd", "-f", format, "-O", target, source, &to_mine];
                stdout_of(&[&args, operands].concat());
                fs::write(&theirs, &whole[part.clone()]).unwrap();
                place.same(target, &mine, &theirs);
                place.sound(target, &mine);
                if target == "raw" {
                    assert_eq!(fs::metadata(&mine).unwrap().len(), part.len() as u64);
                }
                if operands.len() == 2 {
                    let args = ["dd", "-f", format, "-O", target, source, &to_theirs];
                    qemu_img(&[&args, operands].concat());
                    qemu_img(&["compare", "-f", target, "-F", target, &mine, &theirs]);
                    let size = |path| {
                        qemu_json(&["info", "--output=json", "-f", target, path])["virtual-size"]
                            .clone()
                    };
                    assert_eq!(size(&mine), size(&theirs), "{operands:?}");
                }
            }
            let args = ["img", "dd", "-f", format, source, "of=-"];
            let output = run(&[&args, operands].concat());
            assert!(output.stdout == whole[part], "{operands:?}");
        }
    }
    let dd = |operands: &[&str], words: &[&str]| {
        refused(1, &[&["img", "dd"], operands].concat(), words);
    };
    dd(
        &[&from_disk, &to_mine, "bs=1M", "skip=13"],
        &["disk: has 12586496 bytes", "13631488"],
    );
    dd(
        &[&from_disk, &to_mine, "bs=700", "skip=1"],
        &["not a multiple of 512"],
    );
    dd(&[&from_disk, &to_mine, "bs=0"], &["bs=0"]);
    dd(&[&from_disk, &to_mine, "bs=4E", "skip=16"], &["too many"]);
    dd(&[&from_disk, &to_mine, "seek=1"], &["seek=1"]);
    dd(&[&from_disk, "of=-", "--json"], &["--json"]);
    dd(&[&from_disk], &["of=TARGET"]);
    dd(&[&from_disk, "disk"], &["not an operand"]);
    dd(&[&from_disk, &format!("of={disk}")], &["disk"]);
    assert!(fs::read(&disk).unwrap() == whole);
}
