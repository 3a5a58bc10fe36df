//! Tests image locks against QEMU's own tools, in both directions.

use fathom_core::Disk;
use fathom_storage::{FileDisk, FileOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn image() -> tempfile::NamedTempFile {
    let image = tempfile::Builder::new()
        .tempfile_in(env!("CARGO_TARGET_TMPDIR"))
        .expect("a file");
    image.as_file().set_len(1 << 20).expect("sized");
    image
}

fn writer() -> FileOptions {
    FileOptions::default()
}

fn reader() -> FileOptions {
    FileOptions {
        read_only: true,
        ..FileOptions::default()
    }
}

fn sharing_reader() -> FileOptions {
    FileOptions {
        force_share: true,
        ..reader()
    }
}

fn open(image: &Path, options: FileOptions) -> Result<FileDisk, String> {
    FileDisk::open(image, options).map_err(|error| error.to_string())
}

/// A qemu-io process that keeps the image open until it is dropped.
struct QemuIo(Child);

impl QemuIo {
    fn open(image: &Path, args: &[&str]) -> QemuIo {
        let mut child = Command::new("qemu-io")
            .args(args)
            .args(["-f", "raw"])
            .arg(image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io runs (Debian package qemu-utils)");
        // The reply shows that qemu-io has opened the image.
        let commands = child.stdin.as_mut().expect("stdin");
        commands.write_all(b"length\n").expect("asked");
        let answers = BufReader::new(child.stdout.as_mut().expect("stdout"));
        let length = answers
            .lines()
            .map(|line| line.expect("a line"))
            .find(|line| line.contains("1 MiB"));
        assert!(length.is_some(), "qemu-io could not open the image");
        QemuIo(child)
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn qemu_io(image: &Path, args: &[&str], command: &str) -> Output {
    Command::new("qemu-io")
        .args(args)
        .args(["-f", "raw", "-c", command])
        .arg(image)
        .output()
        .expect("qemu-io runs (Debian package qemu-utils)")
}

/// Copies the whole image with qemu-img, which locks it against changes.
fn qemu_img_convert(image: &Path, args: &[&str]) -> Output {
    let copy = tempfile::NamedTempFile::new().expect("a file");
    Command::new("qemu-img")
        .arg("convert")
        .args(args)
        .args(["-f", "raw", "-O", "raw"])
        .args([image, copy.path()])
        .output()
        .expect("qemu-img runs (Debian package qemu-utils)")
}

#[test]
fn an_image_that_qemu_writes_is_refused() {
    let image = image();
    let qemu = QemuIo::open(image.path(), &[]);
    for options in [writer(), reader()] {
        let error = open(image.path(), options).err().expect("refused");
        assert!(
            error.contains(&format!("in use by qemu-io (process {})", qemu.0.id())),
            "{error}"
        );
        assert!(error.contains(&*image.path().to_string_lossy()));
    }
    let disk = open(image.path(), sharing_reader()).expect("shared");
    disk.activate().expect("shared");
    drop(qemu);
    disk.deactivate().expect("unlocked");
    let disk = open(image.path(), writer()).expect("free again");
    disk.activate().expect("free again");
}

#[test]
fn an_image_that_qemu_took_since_it_was_opened_is_refused() {
    let image = image();
    let disk = open(image.path(), writer()).expect("free");
    let qemu = QemuIo::open(image.path(), &[]);
    let error = disk.activate().expect_err("refused").to_string();
    assert!(error.contains("in use by qemu-io (process"), "{error}");
    // The failed activation has left no lock behind, so a QEMU process can open the image.
    drop(qemu);
    assert!(qemu_io(image.path(), &[], "write 0 4k").status.success());
    disk.activate().expect("free again");
}

#[test]
fn qemu_keeps_off_an_image_that_is_being_served() {
    let image = image();
    let disk = open(image.path(), writer()).expect("free");
    // An inactive disk is not locked.
    assert!(qemu_io(image.path(), &[], "write 0 4k").status.success());
    disk.activate().expect("free");
    let refused = qemu_io(image.path(), &[], "write 0 4k");
    assert!(!refused.status.success());
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(error.contains("Failed to get"), "{error}");
    assert!(!qemu_img_convert(image.path(), &[]).status.success());
    assert!(qemu_img_convert(image.path(), &["-U"]).status.success());
    disk.deactivate().expect("unlocked");
    assert!(qemu_io(image.path(), &[], "write 0 4k").status.success());
}

#[test]
fn readers_share_an_image_and_keep_writers_off() {
    let image = image();
    let one = open(image.path(), reader()).expect("free");
    one.activate().expect("free");
    let two = open(image.path(), reader()).expect("readers share");
    two.activate().expect("readers share");
    assert!(qemu_img_convert(image.path(), &[]).status.success());
    assert!(!qemu_io(image.path(), &[], "write 0 4k").status.success());
    assert!(open(image.path(), writer()).is_err());
    one.deactivate().expect("unlocked");
    assert!(open(image.path(), writer()).is_err());
    two.deactivate().expect("unlocked");
    assert!(open(image.path(), writer()).is_ok());
}

#[test]
fn two_writers_exclude_each_other() {
    let image = image();
    let one = open(image.path(), writer()).expect("free");
    let two = open(image.path(), writer()).expect("free");
    one.activate().expect("free");
    assert!(two.activate().is_err());
    one.deactivate().expect("handed over");
    two.activate().expect("handed over");
}

#[test]
fn writers_cannot_force_sharing() {
    let image = image();
    let options = FileOptions {
        force_share: true,
        ..writer()
    };
    let error = open(image.path(), options).err().expect("refused");
    assert!(error.contains("--readonly"), "{error}");
}

#[test]
fn an_image_that_is_about_to_be_released_is_waited_for() {
    let image = image();
    let patient = || FileOptions {
        patient: true,
        ..writer()
    };
    let before = open(image.path(), patient()).expect("opened");
    before.activate().expect("locked");
    assert!(open(image.path(), writer()).is_err());
    let after = open(image.path(), patient()).expect("opened before the other's end");
    let release = std::thread::spawn(move || {
        // Meanwhile the other disk tries to lock the image.
        std::thread::sleep(std::time::Duration::from_millis(300));
        drop(before);
    });
    after.activate().expect("locked");
    release.join().expect("released");
}

/// A disk with `keeps_lock` holds the lock until it is closed, not only while it is active.
#[test]
fn a_lock_may_outlast_the_use() {
    let image = image();
    let keeping = FileOptions {
        keeps_lock: true,
        ..writer()
    };
    let disk = open(image.path(), keeping).expect("opened");
    disk.activate().expect("locked");
    disk.deactivate().expect("still locked");
    let refused = open(image.path(), reader()).err().expect("refused");
    assert!(refused.contains("in use"), "{refused}");
    disk.activate().expect("locked as before");
    drop(disk);
    let other = open(image.path(), writer()).expect("opened");
    other.activate().expect("locked");
}
