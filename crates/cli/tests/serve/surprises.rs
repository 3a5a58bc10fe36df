//! Checks image files that other programs cut, replace or delete while they are served.

use crate::driver::{Driver, Request, with_disk};
use crate::kinds::{qemu_img, tool};
use crate::support::{Served, as_arg, disk_dir, run};
use std::fs::{self, File};
use std::path::Path;

const SIZE: usize = 8 << 20;
const CLUSTER: usize = 64 << 10;

/// Makes an image `i` in `dir` that is full of data. Returns the data.
fn full_image(dir: &Path, format: &str) -> Vec<u8> {
    let data: Vec<u8> = (0..SIZE / 8)
        .flat_map(|n| (n as u64 | 1 << 63).to_le_bytes())
        .collect();
    fs::write(dir.join("raw"), &data).unwrap();
    qemu_img(dir, &["convert", "-f", "raw", "-O", format, "raw", "i"]);
    data
}

/// Cuts the image to `len` bytes.
fn cut(dir: &Path, len: u64) {
    let image = File::options().write(true).open(dir.join("i")).unwrap();
    image.set_len(len).unwrap();
}

fn len(dir: &Path) -> u64 {
    fs::metadata(dir.join("i")).unwrap().len()
}

fn read(disk: &mut Driver<'_>, offsets: impl Iterator<Item = usize>) -> Vec<Result<Vec<u8>, i32>> {
    let reads = offsets.map(|at| Request::Read {
        offset: at as u64,
        len: 4096,
    });
    disk.all(&reads.collect::<Vec<_>>())
}

fn corrupt_bit(dir: &Path) -> bool {
    qemu_img(dir, &["info", "i"]).contains("corrupt: true")
}

#[test]
fn what_was_cut_off_is_never_zeroes() {
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = [disk_dir(), disk_dir()];
    for (dir, args, format) in [
        (disk[0].path(), &[][..], "qcow2"),
        (
            disk[1].path(),
            &["--cache", "writeback", "--aio", "threads"],
            "qed",
        ),
        (memory.path(), &[], "qcow2"),
    ] {
        eprintln!("{dir:?} {format}");
        let data = full_image(dir, format);
        let whole = len(dir);
        let half = whole / 2;
        let args = [args, &["--format", format]].concat();
        let mut server = Served::start(&as_arg(&dir.join("i")), &args);
        with_disk(&server.arg("s"), 1, |disk| {
            assert!(disk.contents() == data);
            cut(dir, half);
            let lost = (SIZE * 3 / 5 / CLUSTER * CLUSTER..SIZE).step_by(CLUSTER);
            let found = read(disk, lost);
            assert!(found.iter().all(Result::is_err), "zeroes are read");
            let left = read(disk, std::iter::once(0));
            assert_eq!(left[0].as_deref(), Ok(&data[..4096]));
            let write = Request::Write {
                offset: SIZE as u64 - 4096,
                data: vec![7; 4096],
            };
            let refused = disk.all(&[write]);
            assert!(refused[0].is_err(), "it is written to");
            assert!(disk.all(&[Request::Flush])[0].is_err());
        });
        assert_eq!(server.terminate().0, Some(0));
        let log = server.log();
        let line = format!("truncated while it was served, from {whole} bytes to {half}");
        assert_eq!(log.matches(&line).count(), 1, "{log}");
        assert!(!log.contains("failed: "), "{log}");
        assert_eq!(len(dir), half);
        assert!(format == "qed" || corrupt_bit(dir));
    }
}

/// QEMU may also leave the last cluster of a file incomplete.
#[test]
fn a_file_may_end_within_its_last_cluster() {
    let dir = disk_dir();
    let dir = dir.path();
    let mut data = full_image(dir, "qcow2");
    cut(dir, len(dir) - CLUSTER as u64 / 2);
    data[SIZE - CLUSTER / 2..].fill(0);
    let mut server = Served::start(&as_arg(&dir.join("i")), &["--format", "qcow2"]);
    with_disk(&server.arg("s"), 1, |disk| {
        assert!(disk.contents() == data);
        data[SIZE - 4096..].fill(9);
        let write = Request::Write {
            offset: SIZE as u64 - 4096,
            data: vec![9; 4096],
        };
        assert!(disk.all(&[write, Request::Flush]).iter().all(Result::is_ok));
        assert!(disk.contents() == data);
    });
    assert_eq!(server.terminate().0, Some(0));
    let log = server.log();
    assert!(!log.contains("ERROR"), "{log}");
    assert_eq!(
        tool(dir, "qemu-img", &["check", "i"]).status.code(),
        Some(0)
    );
    // The tables must be complete, however.
    cut(dir, 4 * CLUSTER as u64);
    let mut server = Served::start(&as_arg(&dir.join("i")), &["--format", "qcow2"]);
    let bench = [
        "bench",
        "--vhost-user",
        &server.arg("s"),
        "--number-ios",
        "1",
    ];
    assert!(!run(&bench).status.success());
    server.wait_for("table at 0x");
}

/// QEMU reads zeroes from the part that was cut off before it opened the image.
#[test]
fn truncated_image_is_written_only_with_zero_missing_clusters() {
    const LOST: usize = SIZE - 4 * CLUSTER;
    let dir = disk_dir();
    let dir = dir.path();
    let mut data = full_image(dir, "qcow2");
    cut(
        dir,
        len(dir).next_multiple_of(CLUSTER as u64) - 4 * CLUSTER as u64,
    );
    let image = as_arg(&dir.join("i"));
    let mut server = Served::start(&image, &["--format", "qcow2"]);
    let bench = ["bench", "--vhost-user", &server.arg("s")];
    let bench = [&bench[..], &["--number-ios", "1"]].concat();
    assert!(!run(&bench).status.success());
    server.wait_for("not opened for writing: its file is truncated");
    assert!(server.log().contains("--zero-missing-clusters"));
    assert_eq!(server.terminate().0, Some(0));
    // A read-only disk has the data that is left.
    let mut server = Served::start(&image, &["--format", "qcow2", "--readonly"]);
    with_disk(&server.arg("s"), 1, |disk| {
        let lost = read(disk, (LOST..SIZE).step_by(CLUSTER));
        assert!(lost.iter().all(|read| *read == Err(libc::EIO)), "{lost:?}");
        let left = read(disk, (0..LOST).step_by(CLUSTER));
        for (at, left) in (0..LOST).step_by(CLUSTER).zip(left) {
            assert_eq!(left.as_deref(), Ok(&data[at..at + 4096]));
        }
    });
    assert_eq!(server.terminate().0, Some(0));
    let log = server.log();
    assert_eq!(log.matches("beyond the file's end").count(), 1, "{log}");
    // With `--zero-missing-clusters`, the lost data reads as zeroes, and the disk is writable.
    let options = ["--format", "qcow2", "--zero-missing-clusters"];
    let mut server = Served::start(&image, &options);
    data[LOST..].fill(0);
    with_disk(&server.arg("s"), 1, |disk| {
        assert!(disk.contents() == data);
        data[SIZE - 4096..].fill(9);
        let write = Request::Write {
            offset: SIZE as u64 - 4096,
            data: vec![9; 4096],
        };
        assert!(disk.all(&[write, Request::Flush]).iter().all(Result::is_ok));
        assert!(disk.contents() == data);
    });
    assert_eq!(server.terminate().0, Some(0));
}

#[test]
fn replaced_or_deleted_file_is_reported_at_the_next_attach() {
    let dir = disk_dir();
    let dir = dir.path();
    for format in ["raw", "qcow2"] {
        let data = full_image(dir, format);
        let mut server = Served::start(&as_arg(&dir.join("i")), &["--format", format]);
        let socket = server.arg("s");
        let contents = || with_disk(&socket, 1, |disk| disk.contents());
        assert!(contents() == data);
        assert!(!server.log().contains("since it was opened"));
        fs::copy(dir.join("raw"), dir.join("other")).unwrap();
        fs::rename(dir.join("other"), dir.join("i")).unwrap();
        assert!(contents() == data);
        fs::remove_file(dir.join("i")).unwrap();
        assert!(contents() == data);
        assert_eq!(server.terminate().0, Some(0));
        let log = server.log();
        assert_eq!(
            log.matches("was replaced by another file").count(),
            1,
            "{log}"
        );
        assert_eq!(log.matches("was deleted or renamed").count(), 1, "{log}");
    }
}
