//! Tests `fathom img rebase` and `commit` with qemu-img as the reference, and with kills.

use crate::place::{MIB, Place};
use crate::support::{eventually, fathom, refused, run, stdout_of};
use crate::{qemu_img, qemu_uses};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn a_rebased_disk_reads_as_before() {
    for format in ["qcow2", "qed"] {
        let place = Place::new();
        let writes = ["write -P 1 0 2M", "write -P 3 9M 1M", "write -P 4 12M 2M"];
        let other = place.image("other", "raw", &[], &writes);
        fs::File::options()
            .write(true)
            .open(&other)
            .and_then(|file| file.set_len(13 * MIB))
            .unwrap();
        for (args, has) in [
            (&["-b", "other", "-F", "raw"][..], Some("other")),
            (&["-b", ""], None),
            (&["-b", "base", "-F", "qcow2"], Some("base")),
        ] {
            let (_, top) = place.chain(format);
            stdout_of(&[&["img", "rebase"], args, &[&top]].concat());
            place.same(format, &top, &place.path("before"));
            place.sound(format, &top);
            let info = qemu_img(&["info", "--output=json", &top]);
            let info: serde_json::Value = serde_json::from_str(&info).unwrap();
            assert_eq!(info["backing-filename"].as_str(), has);
        }
        // With -u only the name changes, even if no file of that name exists.
        let (_, top) = place.chain(format);
        let to = ["-u", "-b", "gone", "-F", "raw"];
        stdout_of(&[&["img", "rebase"], &to[..], &[&top]].concat());
        let info = qemu_img(&["info", &top]);
        assert!(info.contains("backing file: gone"), "{info}");
        if format == "qcow2" {
            let (_, top) = place.chain(format);
            qemu_img(&["bitmap", "--add", &top, "b0"]);
            stdout_of(&["img", "rebase", "-b", "other", "-F", "raw", &top]);
            place.same(format, &top, &place.path("before"));
            place.sound(format, &top);
            assert!(qemu_img(&["info", &top]).contains("b0"));
        }
        let (base, top) = place.chain(format);
        let rebase = |args: &[&str], words: &[&str]| {
            refused(1, &[&["img", "rebase"], args].concat(), words);
            place.same(format, &top, &place.path("before"));
        };
        rebase(&["-b", "gone", "-F", "raw", &top], &["gone"]);
        rebase(&["-b", "other", &top], &["-F"]);
        rebase(&["-b", &top, "-F", format, &top], &["its own backing file"]);
        rebase(&["-b", "", &place.path("before")], &["raw images"]);
        if format == "qed" {
            let args = ["-c", "-b", "other", "-F", "raw", &top];
            rebase(&args, &["cannot be compressed"]);
        }
        let loops = ["-b", &top, "-F", format, &base];
        rebase(&loops, &["loop"]);
    }
}

/// An image in use is not rebased, nor is one whose backing file is in use, unless the user
/// insists.
#[test]
fn images_in_use_are_not_rebased() {
    let place = Place::new();
    let (base, top) = place.chain("qcow2");
    let writes = ["write -P 1 0 2M", "write -P 3 9M 1M"];
    place.image("other", "qcow2", &[], &writes);
    let other = place.path("other");
    for used in [&base, &other] {
        let mut user = qemu_uses(used);
        let args = ["img", "rebase", "-b", &other, "-F", "qcow2", &top];
        refused(1, &args, &["in use", used, "--force-share"]);
        stdout_of(&["img", "rebase", "-U", "-b", &other, "-F", "qcow2", &top]);
        drop(user.stdin.take());
        user.wait().unwrap();
        place.same("qcow2", &top, &place.path("before"));
        place.sound("qcow2", &top);
        stdout_of(&["img", "rebase", "-b", &base, "-F", "qcow2", &top]);
    }
    let mut user = qemu_uses(&top);
    let args = ["img", "rebase", "-U", "-b", "", &top];
    refused(1, &args, &["in use", &top]);
    drop(user.stdin.take());
    user.wait().unwrap();
}

/// Unallocated parts read as zeroes, and still do on a backing file that has data there.
#[test]
fn an_image_without_a_backing_file_can_get_one() {
    let all: [(&str, &[&str]); 4] = [
        ("qcow2", &[]),
        ("qcow2", &["-o", "compat=0.10"]),
        ("qcow2", &["-o", "extended_l2=on"]),
        ("qed", &[]),
    ];
    for (format, options) in all {
        let place = Place::new();
        let writes = ["write -P 1 0 2M", "write -P 3 9M 1M", "write -P 4 19M 1M"];
        place.image("other", "raw", &[], &writes);
        let writes = ["write -P 5 1M 64k", "write -P 6 19500k 512"];
        let alone = place.image("alone", format, options, &writes);
        let before = place.path("before");
        qemu_img(&["convert", "-f", format, "-O", "raw", &alone, &before]);
        stdout_of(&["img", "rebase", "-b", "other", "-F", "raw", &alone]);
        place.same(format, &alone, &before);
        place.sound(format, &alone);
        assert!(qemu_img(&["info", &alone]).contains("backing file: other"));
    }
}

#[test]
fn what_is_committed_is_in_the_base() {
    for format in ["qcow2", "qed"] {
        let place = Place::new();
        let before = place.path("before");
        let (base, top) = place.chain(format);
        stdout_of(&["img", "commit", "-q", &top]);
        place.same("qcow2", &base, &before);
        place.same(format, &top, &before);
        place.sound("qcow2", &base);
        place.sound(format, &top);
        if format == "qcow2" {
            let map = qemu_img(&["map", &top]);
            assert!(!map.contains("top"), "the image is empty: {map}");
        }
        // Commits to an image further below, which is shorter.
        let (base, top) = place.chain(format);
        let bottom = place.path("bottom");
        qemu_img(&["create", "-q", "-f", "raw", &bottom, "3M"]);
        qemu_img(&["rebase", "-f", "qcow2", "-b", &bottom, "-F", "raw", &base]);
        stdout_of(&["img", "commit", "-b", &bottom, &top]);
        place.same("raw", &bottom, &before);
        place.same(format, &top, &before);
        let none = place.path("none");
        let args = ["img", "commit", "-b", &none, &top];
        refused(1, &args, &["not one of its backing files"]);
    }
    let place = Place::new();
    let alone = place.image("alone", "qcow2", &[], &[]);
    refused(1, &["img", "commit", &alone], &["no backing file"]);
}

/// After a kill at any moment, the disk reads as before, and the images have no errors but leaks.
#[test]
fn killed_tools_lose_nothing() {
    let rounds = if std::env::var_os("FATHOM_ROUNDS").is_some() {
        200
    } else {
        12
    };
    let sound = |image: &str| {
        // The kernel may still hold the locks of the killed process.
        let checked = eventually("its locks are gone", || {
            let checked = run(&["img", "check", "-q", image]);
            let told = String::from_utf8_lossy(&checked.stderr).contains("in use");
            (!told).then_some(checked)
        });
        assert!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
    };
    let mut killed = 0;
    for round in 0..rounds {
        let place = Place::new();
        let (base, top) = place.chain("qcow2");
        let before = place.path("before");
        let (commit, rebase) = (["commit", &top], ["rebase", "-b", "", &top]);
        let args: &[&str] = if round % 2 == 0 { &commit } else { &rebase };
        let mut child = fathom()
            .arg("img")
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(2000 + round * 37_000 % 60_000));
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        sound(&base);
        sound(&top);
        place.same("qcow2", &top, &before);
        // The command can be repeated.
        stdout_of(&[&["img"], args].concat());
        place.same("qcow2", &top, &before);
    }
    assert!(killed > 0, "none was killed before it had ended");
}

/// An interrupted commit reports that the overlay is unchanged.
#[test]
fn an_interrupted_commit_can_be_given_again() {
    let place = Place::new();
    let (base, top) = place.chain("qcow2");
    let before = place.path("before");
    let mut child = fathom()
        .args(["img", "commit", "--rate", "100k", "--json", &top])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(child.stdout.take().unwrap()).lines();
    told.next().expect("it has begun").unwrap();
    let pid = child.id().to_string();
    let kill = Command::new("kill").args(["-INT", &pid]).status();
    assert!(kill.unwrap().success());
    let told: Vec<_> = told.map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(
        told.iter().any(|line| line.contains("is unchanged")),
        "{told:?}"
    );
    place.same("qcow2", &top, &before);
    place.sound("qcow2", &base);
    stdout_of(&["img", "commit", "-q", &top]);
    place.same("qcow2", &base, &before);
}
