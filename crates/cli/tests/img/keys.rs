//! Tests the keys of encrypted images: their sources, and how keys are added and removed.

use crate::encryption::{FORMATS, Locked};
use crate::support::{as_arg, fathom, pass, refused, stdout_of};
use crate::{qemu_img, qemu_json};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;

#[test]
fn keys_come_and_go() {
    let locked = Locked::new();
    let (other, third) = (locked.key("other", "another"), locked.key("third", "3"));
    for format in FORMATS {
        let image = locked.path(format);
        let create = ["img", "create", "-q", "--key", &locked.key, "-f", format];
        stdout_of(&[&create[..], &["-o", Locked::options(format), &image, "4M"]].concat());
        let amend = |args: &[&str]| {
            stdout_of(&[&["img", "amend", "--iter-time", "10"], args, &[&image]].concat())
        };
        let unlocks = |key: &str| {
            let out = locked.path("out");
            let convert = ["convert", "-q", "--key", key, "-O", "raw", &image, &out];
            crate::support::run(&[&["img"], &convert[..]].concat())
                .status
                .success()
        };
        assert!(unlocks(&locked.key) && !unlocks(&other));
        assert_eq!(
            amend(&["--key", &locked.key, "--add-key", &other]),
            "Key slot 1 added.\n"
        );
        assert!(unlocks(&locked.key) && unlocks(&other));
        // A single command replaces a key by another.
        let said = amend(&[
            "--key",
            &other,
            "--add-key",
            &third,
            "--remove-key",
            &locked.key,
        ]);
        assert_eq!(said, "Key slot 2 added.\nKey slot 0 removed.\n");
        assert!(!unlocks(&locked.key) && unlocks(&other) && unlocks(&third));
        if format == "luks" {
            assert!(!locked.opens_by(&image, "key"));
            assert!(locked.opens_by(&image, "other") && locked.opens_by(&image, "third"));
        }
        amend(&["-q", "--remove-slot", "1"]);
        assert!(!unlocks(&other) && unlocks(&third));
        let refuse = |args: &[&str], words: &[&str]| {
            refused(1, &[&["img", "amend"], args, &[&image]].concat(), words);
        };
        refuse(&["--remove-slot", "2"], &["last one"]);
        refuse(&["--remove-key", &third], &["last one"]);
        refuse(&["--remove-slot", "5"], &["slot 5", "not in use"]);
        refuse(&["--remove-key", &other], &["opens none"]);
        refuse(
            &["--key", &other, "--add-key", &locked.key],
            &["opens none"],
        );
        refuse(&["--add-key", &other], &["--key"]);
        assert!(unlocks(&third));
        locked.key("key", "3");
        let secret = locked.secret("key");
        qemu_img(&[
            "compare",
            "--object",
            &secret,
            "--image-opts",
            &Locked::opens(format, &image),
            &Locked::opens(format, &image),
        ]);
        locked.key("key", "a secret\n");
    }
    // The same key is in two slots; it is removed from both. Slots have the numbers that are shown.
    let image = locked.path("second");
    let create = [
        "img",
        "create",
        "-q",
        "--key",
        &locked.key,
        "-f",
        "luks",
        "-o",
    ];
    stdout_of(&[&create[..], &["version=2,iter-time=10", &image, "4M"]].concat());
    let amend = |args: &[&str]| {
        stdout_of(&[&["img", "amend", "--iter-time", "10"], args, &[&image]].concat())
    };
    amend(&[
        "--key",
        &locked.key,
        "--add-key",
        &locked.key,
        "--add-key",
        &other,
    ]);
    let all = [
        "img",
        "amend",
        "-q",
        "--remove-key",
        &locked.key,
        "--remove-key",
        &other,
        &image,
    ];
    refused(1, &all, &["last one"]);
    amend(&[
        "--key",
        &other,
        "--add-key",
        &locked.key,
        "--add-key",
        &locked.key,
    ]);
    let removed = amend(&["--remove-key", &locked.key]);
    assert_eq!(removed, "Key slot 0 removed.\nKey slot 1 removed.\n");
    let shown = stdout_of(&["img", "info", &image]);
    assert!(
        shown.contains("[2]:\n            number: 2") && !shown.contains("[0]:"),
        "{shown}"
    );
    assert!(locked.opens_by(&image, "other") && !locked.opens_by(&image, "key"));
    // The image does not change before all keys have been read.
    let plain = locked
        .place
        .image("plain", "qcow2", &["-o", "compat=0.10"], &[]);
    let version = || {
        qemu_json(&["info", "--output=json", &plain])["format-specific"]["data"]["compat"].clone()
    };
    let missing = ["--key", &locked.key, "--add-key", "file:/nowhere", &plain];
    refused(
        1,
        &[&["img", "amend", "-o", "compat=1.1"], &missing[..]].concat(),
        &["/nowhere"],
    );
    assert_eq!(version(), "0.10");
    refused(
        1,
        &["img", "amend", "--remove-slot", "0", &plain],
        &["not encrypted"],
    );
}

#[test]
fn a_key_comes_from_where_it_is_and_is_never_shown() {
    let locked = Locked::new();
    let image = locked.path("image");
    let create = [
        "img",
        "create",
        "-f",
        "luks",
        "-o",
        "iter-time=10",
        &image,
        "1M",
    ];
    // The key is missing, or is given as an argument; the error does not show it.
    refused(1, &create, &["--key"]);
    let shown = crate::support::run(&[&create[..], &["--key", "hunter2"]].concat());
    let said = String::from_utf8_lossy(&shown.stderr);
    assert_eq!(shown.status.code(), Some(2), "{said}");
    assert!(
        !said.contains("hunter2") && said.contains("file:PATH"),
        "{said}"
    );
    let open = File::open(locked.path("key")).unwrap();
    let by_descriptor = |args: &[&str]| {
        let mut command = fathom();
        command.args(args).args(["--key", "fd:3"]);
        pass(&mut command, open.as_raw_fd());
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    by_descriptor(&create);
    let out = locked.path("out");
    let read = ["img", "convert", "-q", "-O", "raw", &image, &out];
    by_descriptor(&read);
    let unlocks = |key: &str| stdout_of(&[&read[..], &["--key", key]].concat());
    unlocks(&locked.key);
    // The line break at the end of a program's output is not part of the key.
    unlocks(&format!("command:sh -c 'cat {}; echo'", locked.path("key")));
    let mut credential = fathom();
    let dir = as_arg(locked.place.0.path());
    credential
        .args(read)
        .args(["--key", "credential:key"])
        .env("CREDENTIALS_DIRECTORY", dir);
    assert!(credential.status().unwrap().success());
    // The second of two keys is the right one.
    let wrong = locked.key("wrong", "a wrong one");
    stdout_of(&[&read[..], &["--key", &wrong, "--key", &locked.key]].concat());
    for (key, words) in [
        (&*wrong, &["no given key"][..]),
        ("file:/nowhere", &["/nowhere", "no such file"]),
        ("credential:key", &["no credentials"]),
        ("command:false", &["exit status: 1"]),
        ("fd:99", &["fd:99"]),
    ] {
        refused(1, &[&read[..], &["--key", key]].concat(), words);
    }
    refused(1, &read, &["encrypted", "--key"]);
}

/// The command in the documentation creates a key that QEMU accepts as well.
#[test]
fn the_documented_key_is_one_for_qemu_too() {
    let locked = Locked::new();
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/encryption.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let command = docs.lines().find(|line| line.contains("/dev/urandom"));
    let made = Command::new("sh")
        .args(["-c", command.expect("a command")])
        .current_dir(locked.path(""))
        .status();
    assert!(made.unwrap().success());
    let (image, key) = (locked.path("image"), locked.path("vm1.key"));
    let source = format!("file:{key}");
    let options = ["-f", "luks", "-o", "iter-time=10", "--key", &source];
    stdout_of(&[&["img", "create", "-q"], &options[..], &[&image, "1M"]].concat());
    let (secret, opens) = (locked.secret("vm1.key"), Locked::opens("luks", &image));
    let read = ["convert", "--object", &secret, "--image-opts", &opens];
    qemu_img(&[&read[..], &["-O", "raw", &locked.path("read")]].concat());
}
