//! Checks image files that are replaced by other files while a disk has them open.

use crate::driver::{Request, with_disk};
use crate::kinds::qemu_img;
use crate::mirror;
use crate::support::{Served, as_arg, disk_dir, fathom, refused, stdout_of};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

const SIZE: u64 = 4 << 20;
const WHY: &str = "replaced by another file since the disk opened it";

/// A disk, and the file of this disk that is replaced.
struct Case {
    /// The images, as arguments of `qemu-img create`, from the lowest one to the one that is
    /// served.
    images: &'static [&'static [&'static str]],
    args: Vec<String>,
    replaced: &'static str,
    /// Whether the server can take snapshots of the disk.
    has_snapshots: bool,
}

fn cases(dir: &Path) -> Vec<Case> {
    let text = |args: &[&str]| -> Vec<String> { args.iter().map(|arg| (*arg).into()).collect() };
    let raw: &[&str] = &["-f", "raw", "i"];
    let qcow2: &[&str] = &["-f", "qcow2", "i"];
    let base: &[&str] = &["-f", "raw", "base"];
    let above: &[&str] = &["-f", "qcow2", "-b", "base", "-F", "raw", "i"];
    let split: &[&str] = &["-f", "qcow2", "-o", "data_file=data", "i"];
    let data = as_arg(&dir.join("data"));
    let case = |images, args: &[&str], replaced, has_snapshots| Case {
        images,
        args: text(args),
        replaced,
        has_snapshots,
    };
    let in_static = |images: &[&'static [&'static str]]| -> &'static [&'static [&'static str]] {
        Box::leak(images.to_vec().into_boxed_slice())
    };
    let as_qcow2 = ["--format", "qcow2"];
    vec![
        case(in_static(&[raw]), &["--format", "raw"], "i", true),
        case(in_static(&[qcow2]), &as_qcow2, "i", true),
        case(in_static(&[base, above]), &as_qcow2, "i", true),
        case(in_static(&[base, above]), &as_qcow2, "base", true),
        case(
            in_static(&[split]),
            &["--format", "qcow2", "--data-file", &data],
            "data",
            false,
        ),
    ]
}

fn write(offset: u64, byte: u8) -> Request {
    let data = vec![byte; 64 << 10];
    Request::Write { offset, data }
}

/// Checks that the disk has this byte, and writes the next one.
fn check(socket: &str, byte: u8) {
    with_disk(socket, 1, |disk| {
        let contents = disk.contents();
        assert!(contents[1 << 20..][..64 << 10].iter().all(|is| *is == byte));
        let next = [write(1 << 20, byte + 1), Request::Flush];
        assert!(disk.all(&next).iter().all(Result::is_ok));
    });
}

#[test]
fn disk_stays_on_its_open_files_when_they_are_replaced() {
    let count = cases(Path::new("")).len();
    for n in 0..count {
        let dir = disk_dir();
        let path = |name: &str| as_arg(&dir.path().join(name));
        let Case {
            images,
            args,
            replaced,
            has_snapshots,
        } = cases(dir.path()).swap_remove(n);
        eprintln!("{images:?}, {replaced}");
        for image in images {
            let size = SIZE.to_string();
            qemu_img(dir.path(), &[&["create"], *image, &[&*size]].concat());
        }
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let mut served = Served::start(&path("i"), &args);
        let (socket, api) = (served.arg("s"), served.api());
        with_disk(&socket, 1, |disk| {
            let all = [write(1 << 20, 1), Request::Flush];
            assert!(disk.all(&all).iter().all(Result::is_ok));
        });
        let ways: &[&[&str]] = &[
            &["disk", "change", &api, "iothreads=2"],
            &["upgrade", &api],
            &["snapshot", &api, &path("layer"), "--transient"],
        ];
        let ways = &ways[..if has_snapshots { 3 } else { 2 }];
        fs::copy(path(replaced), path("copy")).unwrap();
        fs::rename(path(replaced), path("aside")).unwrap();
        fs::rename(path("copy"), path(replaced)).unwrap();
        for (n, args) in (1..).zip(ways) {
            refused(1, args, &[&path(replaced), WHY]);
            check(&socket, n);
        }
        assert!(!Path::new(&path("layer")).exists(), "it is left behind");
        // The commands succeed when the open file has its name again.
        fs::rename(path("aside"), path(replaced)).unwrap();
        let done = ways.len() as u8 + 1;
        check(&socket, done);
        stdout_of(ways[0]);
        check(&socket, done + 1);
        served.upgrade();
        assert_eq!(served.end().0, Some(0), "{}", served.log());
        check(&socket, done + 2);
        if has_snapshots {
            stdout_of(ways[2]);
            check(&socket, done + 3);
        }
        stdout_of(&["quit", &api]);
    }
}

/// The data can be saved, although the open file has no name any more.
#[test]
fn disk_whose_file_was_replaced_can_be_copied_to_a_new_image() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    fs::write(path("i"), vec![1; 4 << 20]).unwrap();
    let served = Served::start(&path("i"), &[]);
    fs::write(path("new"), vec![9; 4 << 20]).unwrap();
    fs::rename(path("new"), path("i")).unwrap();
    mirror::start(&served, &path("t"), &["--wait"]);
    mirror::complete(&served, &["--transient"]);
    check(&served.arg("s"), 1);
    let mut found = [0; 1];
    File::open(path("t"))
        .and_then(|file| file.read_exact_at(&mut found, 1 << 20))
        .unwrap();
    assert_eq!(found, [2]);
    assert!(fs::read(path("i")).unwrap() == vec![9; 4 << 20]);
}

/// Checks a symbolic link that changes, as names of devices do, and the target of a mirror.
#[test]
fn link_that_leads_elsewhere_is_another_image() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    for name in ["one", "other", "t"] {
        fs::write(path(name), vec![1; 4 << 20]).unwrap();
    }
    symlink(path("one"), path("i")).unwrap();
    let served = Served::start(&path("i"), &[]);
    let api = served.api();
    fs::remove_file(path("i")).unwrap();
    symlink(path("other"), path("i")).unwrap();
    refused(
        1,
        &["disk", "change", &api, "iothreads=2"],
        &[&path("i"), WHY],
    );
    // Another name of the same file is accepted.
    fs::remove_file(path("i")).unwrap();
    fs::hard_link(path("one"), path("i")).unwrap();
    stdout_of(&["disk", "change", &api, "iothreads=2"]);
    mirror::start(&served, &path("t"), &["--wait"]);
    fs::copy(path("t"), path("copy")).unwrap();
    fs::rename(path("copy"), path("t")).unwrap();
    let complete = ["mirror", "complete", &api, "-q", "--transient"];
    refused(1, &complete, &["target was replaced"]);
    check(&served.arg("s"), 1);
    let mut info = fathom();
    let info = info.args(["info", &api, "--json"]).output().unwrap();
    assert!(String::from_utf8_lossy(&info.stdout).contains(&path("i")));
}
