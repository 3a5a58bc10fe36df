//! Tests the commands of the protocol with libnbd scripts, on disks of every kind.

use super::support::nbd::{Nbd, make_image, prints};
use super::support::{as_arg, disk_dir, short_dir};
use std::fs;
use std::path::Path;

pub const PRELUDE: &str = include_str!("prelude.py");
const COMMANDS: &str = include_str!("commands.py");
const REFUSALS: &str = include_str!("refusals.py");
const IN_FLIGHT: &str = include_str!("in_flight.py");
const OVERTAKING: &str = include_str!("overtaking.py");
const SIZE: u64 = 64 << 20;

fn script(nbd: &Nbd, script: &str, environment: &[(&str, &str)]) {
    nbd.python(&format!("{PRELUDE}{script}"), environment);
}

/// Asserts that the image `ours` has the contents of `theirs` and is sound.
fn compare(dir: &Path, format: &str, ours: &str, theirs: &str) {
    let args = ["compare", "-f", format, "-F", "raw", ours, theirs];
    prints(dir, "qemu-img", &args);
    if format != "raw" {
        prints(dir, "qemu-img", &["check", "-q", "-f", format, ours]);
    }
}

/// Runs all commands on a new disk, then those that are rejected, then many at once.
///
/// In the end the image has the expected contents.
fn exercise(disk: &str, format: Option<&str>, args: &[&str]) {
    let dir = disk_dir();
    let model = as_arg(&dir.path().join("model"));
    let size = SIZE.to_string();
    let format_args: Vec<_> = format.iter().flat_map(|f| ["--format", f]).collect();
    let mut nbd = Nbd::start(disk, &[&format_args, args].concat());
    script(&nbd, COMMANDS, &[("SIZE", &size)]);
    script(&nbd, REFUSALS, &[]);
    let uri = nbd.uri();
    prints(
        dir.path(),
        "nbdcopy",
        &["--destination-is-zero", "--", "/dev/null", &uri],
    );
    nbd.python(
        &format!("{PRELUDE}h = connect(); h.zero(h.get_size(), 0); h.shutdown()"),
        &[],
    );
    script(&nbd, IN_FLIGHT, &[("MODEL", &model)]);
    assert_eq!(nbd.terminate().0, Some(0), "{}", nbd.log());
    if let Some(format) = format {
        // The model is the first part of the disk; the rest is zeroes.
        fs::File::options()
            .write(true)
            .open(&model)
            .and_then(|file| file.set_len(SIZE))
            .unwrap();
        compare(dir.path(), format, disk, &model);
    }
}

#[test]
fn memory_does_every_command() {
    exercise("memory:64M", None, &["--iothreads", "2"]);
}

#[test]
fn raw_files_do_every_command() {
    for aio in ["io_uring", "native", "threads"] {
        let dir = disk_dir();
        let image = make_image(dir.path(), "raw", SIZE);
        exercise(&image, Some("raw"), &["--aio", aio, "--iothreads", "2"]);
    }
}

#[test]
fn images_do_every_command() {
    for format in ["qcow2", "qed"] {
        let dir = disk_dir();
        let image = make_image(dir.path(), format, SIZE);
        exercise(&image, Some(format), &["--iothreads", "2"]);
    }
}

#[test]
fn nothing_is_written_to_a_disk_that_is_read_only() {
    let dir = disk_dir();
    let image = make_image(dir.path(), "raw", SIZE);
    let nbd = Nbd::start(&image, &["--readonly"]);
    script(&nbd, REFUSALS, &[]);
    assert!(fs::read(&image).unwrap().iter().all(|byte| *byte == 0));
}

/// Reads from the device itself, because data in the page cache is returned at once.
#[test]
fn a_small_read_overtakes_large_ones() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    fs::write(&image, vec![1; 32 << 20]).unwrap();
    let nbd = Nbd::start(&as_arg(&image), &["--cache", "none"]);
    script(&nbd, OVERTAKING, &[]);
}

#[test]
fn a_disk_is_under_its_name_and_under_none() {
    let dir = short_dir();
    let nbd = Nbd::start(
        "memory:1M",
        &["--export-name", "a b", "--export-description", "some"],
    );
    let name = |uri: &str| prints(dir.path(), "nbdinfo", &["--size", uri]);
    assert_eq!(name(&nbd.uri_of("a%20b")).trim(), "1048576");
    assert_eq!(name(&nbd.uri()).trim(), "1048576");
    let listed = prints(dir.path(), "nbdinfo", &["--list", "--json", &nbd.uri()]);
    assert!(listed.contains(r#""export-name": "a b""#), "{listed}");
    assert!(listed.contains(r#""description": "some""#), "{listed}");
    let other = super::support::nbd::tool(dir.path(), "nbdinfo", &[&nbd.uri_of("other")]);
    assert!(!other.status.success());
}

/// The client receives the error of each failed command and may continue.
#[test]
fn commands_that_fail_leave_the_connection_as_it_was() {
    let nbd = Nbd::start("memory:16M", &["--filter", "fault:error=ENOSPC,count=6"]);
    let fail = "
h = connect()
refused(lambda: h.pread(4096, 8192), errno.ENOSPC)
refused(lambda: h.pwrite(bytes(4096), 8192), errno.ENOSPC)
refused(lambda: h.flush(), errno.ENOSPC)
refused(lambda: h.trim(4096, 8192), errno.ENOSPC)
refused(lambda: h.zero(4096, 8192), errno.ENOSPC)
refused(lambda: h.flush(), errno.ENOSPC)
h.flush()
assert h.pread(4096, 8192) == bytes(4096)
h.shutdown()
";
    script(&nbd, fail, &[]);
}
