//! `fathom img create | info | check`.

use crate::support::{as_arg, disk_dir, refused, run, stdout_of};
use crate::{create, qemu_img};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn commands_tell_their_options() {
    for (command, options) in [
        (
            "create",
            "--format --backing --backing-format --option --unsafe-backing --quiet --json",
        ),
        (
            "info",
            "--format --backing-chain --force-share --json --output",
        ),
        (
            "check",
            "--format --repair --quiet --force-share --json --output",
        ),
    ] {
        let help = stdout_of(&["img", command, "--help"]);
        for option in options.split_whitespace() {
            assert!(help.contains(option), "{command}: no {option} in {help}");
        }
    }
    let names = stdout_of(&["img", "create", "-f", "qcow2", "-o", "help", "x"]);
    for name in ["cluster_size", "data_file_raw", "refcount_bits"] {
        assert!(names.lines().any(|line| line == name));
    }
}

#[test]
fn images_are_made_described_and_checked_as_by_qemu_img() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, top) = (path("base"), path("top"));
    let options = "cluster_size=4k,lazy_refcounts";
    let said = stdout_of(&["img", "create", "-f", "qcow2", "-o", options, &base, "10M"]);
    assert!(said.starts_with("Formatting '"), "{said}");
    assert!(said.contains("lazy_refcounts=on"), "{said}");
    create(&top, &["-q", "-f", "qed", "-b", &base, "-F", "qcow2"]);
    for (mine, theirs) in [
        (vec!["img", "info", &base], vec!["info", &base]),
        (
            vec!["img", "info", "--backing-chain", &top],
            vec!["info", "--backing-chain", &top],
        ),
        (vec!["img", "check", &base], vec!["check", &base]),
        (vec!["img", "check", &top], vec!["check", &top]),
    ] {
        assert_eq!(stdout_of(&mine), qemu_img(&theirs), "{mine:?}");
        let json =
            |text: String| -> serde_json::Value { serde_json::from_str(&text).expect("JSON") };
        let mine = stdout_of(&[&mine[..], &["--output=json"]].concat());
        let theirs = qemu_img(&[&theirs[..], &["--output=json"]].concat());
        assert_eq!(json(mine), json(theirs));
    }
}

#[test]
fn exit_statuses_are_those_of_qemu_img() {
    let dir = disk_dir();
    let path = as_arg(&dir.path().join("i"));
    let status = |args: &[&str]| {
        let mine = run(&[&["img", "check"], args, &[&path]].concat());
        let mut theirs = Command::new("qemu-img");
        let theirs = theirs.arg("check").args(args).arg(&path);
        let theirs = theirs.output().expect("qemu-img").status.code();
        (mine.status.code().expect("an end"), theirs.expect("an end"))
    };
    create(&path, &["-q", "-f", "qcow2", "-o", "size=1M"]);
    assert_eq!(status(&[]), (0, 0));
    // A refcount of a cluster that is not there; one that is lost.
    let write = |at: u64, bytes: &[u8]| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(&path);
        let file = file.expect("the image");
        file.set_len(8 << 16).expect("longer");
        file.write_all_at(bytes, at).expect("written");
    };
    write((2 << 16) + 10, &[0, 1]);
    assert_eq!(status(&[]), (3, 3));
    write((2 << 16) + 6, &[0, 0]);
    assert_eq!(status(&[]), (2, 2));
    let repaired = stdout_of(&["img", "check", "-r", "all", &path]);
    assert!(repaired.contains("1 leaked clusters"), "{repaired}");
    assert_eq!(status(&[]), (0, 0));
    write(0, b"none");
    assert_eq!(status(&["-f", "qcow2"]), (1, 1));
    assert_eq!(status(&["-f", "raw"]), (63, 63));
}

#[test]
fn what_is_wrong_is_told_in_one_line() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (raw, image) = (path("raw"), path("i"));
    create(&raw, &["-q", "-o", "size=1M"]);
    for (args, words) in [
        (vec!["-f", "qcow2"], "needs a size"),
        (vec!["-f", "qcow2", "-o", "foo=1"], "no option 'foo'"),
        (
            vec!["-f", "qcow2", "-o", "size=1M,cluster_size=3k"],
            "power of two",
        ),
        (vec!["-f", "qcow2", "-b", &raw], "-F raw"),
        (
            vec!["-f", "qcow2", "-b", &raw, "-F", "qed"],
            "not a qed image",
        ),
        (vec!["-f", "qcow2", "-b", "gone", "-F", "raw"], "gone"),
        (
            vec!["-f", "qcow2", "-b", "i", "-F", "raw"],
            "cannot be opened",
        ),
        (
            vec!["-f", "qcow2", "-b", "nbd:h:1", "-F", "raw"],
            "protocol 'nbd'",
        ),
        (vec!["-f", "raw", "-b", &raw], "no backing file"),
        (
            vec!["-f", "qcow2", "-o", "size=1M,data_file=i"],
            "new image itself",
        ),
        (vec!["-f", "qcow2", "-o", "size=1E"], "L1 table"),
    ] {
        let args = [&["img", "create"], &args[..], &[&image]].concat();
        refused(1, &args, &[words]);
        assert!(!Path::new(&image).exists(), "left behind: {args:?}");
    }
    // Of the image that is there, nothing is lost.
    let args = [
        "img", "create", "-f", "qcow2", "-b", &raw, "-F", "raw", &raw,
    ];
    refused(1, &args, &["backing file, too"]);
    assert_eq!(std::fs::metadata(&raw).expect("still there").len(), 1 << 20);
    refused(1, &["img", "info", "/dev/null"], &["not a regular file"]);
    refused(1, &["img", "info", &path("gone")], &["cannot be opened"]);
    refused(2, &["img", "info", "-f", "vmdk", &raw], &["vmdk"]);
    refused(2, &["img", "check", "-U", "-r", "all", &raw], &["--repair"]);
}

#[test]
fn images_in_use_are_left_alone() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    create(&image, &["-q", "-f", "qcow2", "-o", "size=1M"]);
    let mut user = Command::new("qemu-io")
        .args(["-f", "qcow2", &image])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io runs");
    // Its answer shows that it has opened the image.
    let commands = user.stdin.as_mut().expect("stdin");
    commands.write_all(b"length\n").expect("asked");
    let answers = BufReader::new(user.stdout.take().expect("stdout")).lines();
    let length = answers.map_while(Result::ok).find(|l| l.contains("1 MiB"));
    assert!(length.is_some(), "qemu-io could not open the image");
    let before = std::fs::read(&image).expect("the image");
    refused(1, &["img", "info", &image], &["in use", "--force-share"]);
    refused(1, &["img", "check", &image], &["in use", "--force-share"]);
    refused(1, &["img", "check", "-r", "all", &image], &["in use"]);
    refused(
        1,
        &["img", "create", "-f", "qcow2", &image, "2M"],
        &["in use"],
    );
    stdout_of(&["img", "info", "-U", &image]);
    stdout_of(&["img", "check", "-U", &image]);
    assert!(std::fs::read(&image).expect("the image") == before);
    drop(user.stdin.take());
    user.wait().expect("qemu-io ends");
    stdout_of(&["img", "check", "-r", "all", &image]);
}
