//! Tests `fathom img create`, `info` and `check`.

use crate::support::{as_arg, disk_dir, refused, run, stdout_of};
use crate::{create, qemu_img, qemu_uses};
use std::path::Path;
use std::process::Command;

#[test]
fn commands_tell_their_options() {
    for (command, options) in [
        (
            "create",
            "--format --backing --backing-format --option --options --unsafe-backing \
             --backing-unsafe --quiet --json",
        ),
        (
            "info",
            "--format --backing-chain --force-share --json --output",
        ),
        (
            "check",
            "--format --repair --quiet --cache --force-share --json --output",
        ),
    ] {
        let help = stdout_of(&["img", command, "--help"]);
        for option in options.split_whitespace() {
            assert!(help.contains(option), "{command}: no {option} in {help}");
        }
    }
    let names = stdout_of(&["img", "create", "-f", "qcow2", "-o", "help", "x"]);
    for name in ["cluster_size", "data_file_raw", "refcount_bits"] {
        assert!(
            names
                .lines()
                .any(|line| line.starts_with(&format!("{name}=")))
        );
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

/// Arguments of `create`; the first few are always tried.
const CREATED: &[&str] = &[
    "i 1.5M",
    "-f qcow2 -b base -F raw i",
    "-f qcow2 -u -b gone -F raw -o compat=v3 i 10M",
    "-f qed -b base -F raw i",
    "-f qcow2 -o data_file=data,preallocation=metadata i 1M",
    "-f raw -o preallocation=full i 1000",
    "i 0",
    "-f raw i 1b",
    "-f raw -o preallocation=off i 0x100000",
    "-f raw -o preallocation=falloc i 1M",
    "-f qcow2 i 1000",
    "-f qcow2 i 0",
    "-f qcow2 i 1T",
    "-f qcow2 -o size=2M i",
    "-f qcow2 -o compat=0.10 i 1M",
    "-f qcow2 -o compat=1.1,cluster_size=512 i 1M",
    "-f qcow2 -o cluster_size=1M,extended_l2=on i 1M",
    "-f qcow2 -o cluster_size=4k,preallocation=full i 1M",
    "-f qcow2 -o lazy_refcounts=on,refcount_bits=1 i 1M",
    "-f qcow2 -o compression_type=zstd i 1M",
    "-f qcow2 -o data_file=data,data_file_raw=on i 1M",
    "-f qcow2 -b base -F raw i 10M",
    "-f qcow2 -b image -F qcow2 -o extended_l2=on,preallocation=metadata i",
    "-f qcow2 -o backing_file=base,backing_fmt=raw i",
    "-f qcow2 -o backing_file=base -F raw i",
    "-f qcow2 -o backing_fmt=raw -b base i",
    "--format qcow2 --backing base --backing-format raw i",
    "--backing-unsafe -f qcow2 --backing gone -F raw i 1M",
    "-f qcow2 --options cluster_size=4k -o compat=0.10 i 1M",
    "-f qed i 1M",
    "-f qed -b image -F qcow2 i",
    "-f qed -o cluster_size=4k,table_size=2 i 3M",
    "-q -f qed -o table_size=4 i 3M",
];

/// Arguments that both tools reject.
const NOT_CREATED: &[&str] = &[
    "-f qcow2 i",
    "-f qcow2 -o size=2M i 3M",
    "-f qcow2 -u -b gone i 10M",
    "-f qcow2 -u -b gone -F raw i",
    "-f qcow2 -b base i",
    "-f qed -b base i",
    "-f qcow2 -F raw i 1M",
    "-f qcow2 -b base -F qcow2 i",
    "-f qcow2 -b base -F raw -o preallocation=metadata i",
    "-f raw -b base i",
    "-f qcow2 -o refcount_bits=3 i 1M",
    "-f qcow2",
];

/// Runs `create` in a directory. Returns its output and whether it succeeded.
fn create_in(dir: &Path, program: &mut Command, args: &str) -> (String, bool) {
    let args = args.split_whitespace();
    let output = program.arg("create").args(args).current_dir(dir).output();
    let output = output.expect("qemu-img is installed by `make setup`");
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    (said, output.status.success())
}

fn info_in(dir: &Path, program: &mut Command, args: &[&str]) -> Vec<u8> {
    let output = program.arg("info").args(args).current_dir(dir).output();
    let output = output.expect("qemu-img is installed by `make setup`");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    output.stdout
}

/// Removes from the output of `info` what depends on where a tool stores data.
fn disk_only(info: &[u8]) -> serde_json::Value {
    let mut info: serde_json::Value = serde_json::from_slice(info).expect("JSON");
    let fields = info.as_object_mut().expect("an object");
    fields.remove("children");
    fields.remove("actual-size");
    info
}

#[test]
fn images_are_made_with_the_options_of_qemu_img() {
    let fathom_img = || {
        let mut program = crate::support::fathom();
        program.arg("img");
        program
    };
    for args in crate::pair::sample(CREATED, 6) {
        let dirs = [disk_dir(), disk_dir()];
        for dir in &dirs {
            let path = |name: &str| as_arg(&dir.path().join(name));
            create(&path("base"), &["-q", "-osize=4M"]);
            create(&path("image"), &["-q", "-f", "qcow2", "-osize=5M"]);
        }
        let [mine, theirs] = [dirs[0].path(), dirs[1].path()];
        let made = create_in(mine, &mut fathom_img(), args);
        assert!(made.1, "{args}");
        assert_eq!(made, create_in(theirs, &mut Command::new("qemu-img"), args));
        let qemu = |dir| info_in(dir, &mut Command::new("qemu-img"), &["--output=json", "i"]);
        assert_eq!(disk_only(&qemu(mine)), disk_only(&qemu(theirs)), "{args}");
    }
    for args in NOT_CREATED {
        let dir = disk_dir();
        create(&as_arg(&dir.path().join("base")), &["-q", "-osize=4M"]);
        let theirs = create_in(dir.path(), &mut Command::new("qemu-img"), args);
        let _ = std::fs::remove_file(dir.path().join("i"));
        let mine = create_in(dir.path(), &mut fathom_img(), args);
        assert_eq!((mine.1, theirs.1), (false, false), "{args}");
        assert_eq!(mine.0, "", "{args}");
        assert!(!dir.path().join("i").exists(), "{args}");
    }
}

/// Images with snapshots, bitmaps, flags and data files: everything that `info` reports.
#[test]
fn info_tells_all_that_qemu_img_tells() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let make = |name: &str, args: &str| {
        let args: Vec<&str> = args.split_whitespace().collect();
        create(&path(name), &[&["-q"], &args[..], &["-osize=3M"]].concat());
    };
    make("raw", "");
    make("v2", "-f qcow2 -o compat=0.10");
    make(
        "wide",
        "-f qcow2 -o extended_l2=on,compression_type=zstd,refcount_bits=64",
    );
    make("files", "-f qcow2 -o data_file=data,data_file_raw=on");
    make("kept", "-f qcow2 -o lazy_refcounts=on -b v2 -F qcow2");
    make("qed", "-f qed -b kept -F qcow2");
    for name in ["first", "second one"] {
        qemu_img(&["snapshot", "-c", name, &path("kept")]);
    }
    for (name, args) in [("auto", &[][..]), ("fine", &["--disable", "-g", "512"])] {
        qemu_img(&[&["bitmap", "--add"], args, &[&path("kept"), name]].concat());
    }
    make("flags", "-f qcow2");
    std::fs::copy(path("flags"), path("dirty")).expect("a copy");
    // Sets the last byte of the incompatible features: bit 0 is dirty, bit 1 is corrupt.
    for (name, bits) in [("dirty", 1), ("flags", 2)] {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(path(name));
        let file = file.expect("the image");
        file.write_all_at(&[bits], 79).expect("written");
    }
    for name in [
        "raw", "v2", "wide", "files", "kept", "qed", "flags", "dirty",
    ] {
        for args in [&[][..], &["-U"], &["--backing-chain"]] {
            for form in ["--output=json", "--output=human"] {
                let args = [args, &[form, name]].concat();
                let mut mine = crate::support::fathom();
                let mine = info_in(dir.path(), mine.arg("img"), &args);
                let theirs = info_in(dir.path(), &mut Command::new("qemu-img"), &args);
                let json = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).ok();
                match json(&mine) {
                    Some(mine) => assert_eq!(Some(mine), json(&theirs), "{args:?}"),
                    None => assert_eq!(
                        String::from_utf8_lossy(&mine),
                        String::from_utf8_lossy(&theirs),
                        "{args:?}"
                    ),
                }
            }
        }
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
    // The first change leaks a cluster, and the second one clears the refcount of a used cluster.
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
        (vec!["-f", "qcow2"], "no size given"),
        (
            vec!["-f", "qcow2", "-o", "foo=1"],
            "unknown option of qcow2 images: 'foo'",
        ),
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
        (vec!["-f", "qcow2", "-b", "i", "-F", "raw"], "no such file"),
        (
            vec!["-f", "qcow2", "-b", "nbd:h:1", "-F", "raw"],
            "protocol 'nbd'",
        ),
        (vec!["-f", "raw", "-b", &raw], "no backing file"),
        (
            vec!["-f", "qcow2", "-o", "size=1M,data_file=i"],
            "its own data file",
        ),
        (vec!["-f", "qcow2", "-o", "size=1E"], "L1 table"),
    ] {
        let args = [&["img", "create"], &args[..], &[&image]].concat();
        refused(1, &args, &[words]);
        assert!(!Path::new(&image).exists(), "left behind: {args:?}");
    }
    // The existing image is not changed.
    let args = [
        "img", "create", "-f", "qcow2", "-b", &raw, "-F", "raw", &raw,
    ];
    refused(1, &args, &["its own backing file"]);
    assert_eq!(std::fs::metadata(&raw).expect("still there").len(), 1 << 20);
    refused(1, &["img", "info", "/dev/null"], &["is a character device"]);
    refused(1, &["img", "info", &path("gone")], &["no such file"]);
    refused(1, &["img", "info", "-f", "vmdk", &raw], &["not a vmdk"]);
    refused(2, &["img", "info", "-f", "parallels", &raw], &["parallels"]);
    refused(2, &["img", "check", "-U", "-r", "all", &raw], &["--repair"]);
}

#[test]
fn images_in_use_are_left_alone() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    create(&image, &["-q", "-f", "qcow2", "-o", "size=1M"]);
    let mut user = qemu_uses(&image);
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
