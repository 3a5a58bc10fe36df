//! Checks disks that are mounted as files, with programs of others: QEMU's tools, dd, cp, fio and
//! Python.

use crate::kinds::{qemu_img, tool};
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, run, short_dir, stdout_of,
};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const MIB: u64 = 1 << 20;

/// A server whose only disk is mounted over `file` in its directory.
struct Mount {
    served: Served,
    file: PathBuf,
}

impl Mount {
    fn start(disk: &str, args: &[&str]) -> Mount {
        let dir = short_dir();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let mut command = fathom();
        command.args(["serve", disk, "--fuse"]).arg(&file);
        command.arg("--api").arg(dir.path().join("c")).args(args);
        let mut served = Served::spawn(command, dir);
        served.wait_for("the API is at");
        Mount { served, file }
    }

    fn arg(&self) -> String {
        as_arg(&self.file)
    }

    /// Returns the statistics of the disk.
    fn stats(&self) -> Value {
        let stats = stdout_of(&["stats", &self.served.api(), "--json"]);
        serde_json::from_str(&stats).unwrap()
    }

    /// Stops the server, which must leave the file as it was before.
    fn stop(mut self) {
        let status = self.served.terminate().0;
        assert_eq!(status, Some(0), "{}", self.served.log());
        assert!(!is_mounted(&self.file));
        assert_eq!(fs::read(&self.file).unwrap(), b"");
    }
}

/// Returns whether something is mounted over the file.
fn is_mounted(file: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let at = file.to_str().unwrap();
    mounts
        .lines()
        .any(|line| line.split(' ').nth(4) == Some(at))
}

/// Runs a program, which must succeed. Returns its output.
fn prints(program: &str, args: &[&str]) -> String {
    let output = tool(Path::new("/"), program, args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Creates an image of 64 MiB with data at some places. Returns its path.
fn make_image(dir: &Path, format: &str) -> String {
    let name = format!("image.{format}");
    qemu_img(dir, &["create", "-q", "-f", format, &name, "64M"]);
    let image = as_arg(&dir.join(name));
    let writes = [
        "write -P 1 0 64k",
        "write -P 2 3M 200k",
        "write -P 3 63M 1M",
    ];
    let mut args = vec!["-f", format];
    writes.iter().for_each(|write| args.extend(["-c", write]));
    prints("qemu-io", &[&args[..], &[&image]].concat());
    image
}

/// Returns the ranges with data, as lseek(2) finds them.
fn data_of(file: &str) -> Vec<(u64, u64)> {
    let script = "
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
at = 0
while True:
    try:
        at = os.lseek(file, at, os.SEEK_DATA)
    except OSError as error:
        assert error.errno == 6, error
        break
    end = os.lseek(file, at, os.SEEK_HOLE)
    print(at, end)
    at = end
";
    let lines = prints("python3", &["-c", script, file]);
    let number = |text: &str| text.parse().unwrap();
    let pairs = lines.lines().map(|line| line.split_once(' ').unwrap());
    pairs.map(|(at, end)| (number(at), number(end))).collect()
}

#[test]
fn file_has_the_content_of_the_disk() {
    let dir = disk_dir();
    for format in ["raw", "qcow2"] {
        let image = make_image(dir.path(), format);
        let mount = Mount::start(&image, &["--format", format]);
        let metadata = fs::metadata(&mount.file).unwrap();
        assert!(metadata.is_file());
        assert_eq!((metadata.len(), metadata.mode() & 0o777), (64 * MIB, 0o400));
        let compare = ["compare", "-U", "-f", "raw", "-F", format];
        prints(
            "qemu-img",
            &[&compare[..], &[&mount.arg(), &image]].concat(),
        );
        // Unaligned, and across the end.
        let file = File::open(&mount.file).unwrap();
        let mut bytes = [0; 1000];
        assert_eq!(file.read_at(&mut bytes, 3 * MIB - 1).unwrap(), 1000);
        assert_eq!((bytes[0], bytes[1], bytes[999]), (0, 2, 2));
        assert_eq!(file.read_at(&mut bytes, 64 * MIB - 10).unwrap(), 10);
        assert_eq!(file.read_at(&mut bytes, 64 * MIB).unwrap(), 0);
        let refused = OpenOptions::new().write(true).open(&mount.file);
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EROFS));
        drop(file);
        mount.stop();
    }
}

#[test]
fn holes_are_found_and_copied_as_holes() {
    let dir = disk_dir();
    for format in ["raw", "qcow2"] {
        let image = make_image(dir.path(), format);
        let mount = Mount::start(&image, &["--format", format]);
        let data = data_of(&mount.arg());
        // (The image may have data in larger pieces than were written.)
        for at in [0, 3 * MIB, 63 * MIB] {
            assert!(data.iter().any(|(from, to)| (*from..*to).contains(&at)));
        }
        assert!(data.iter().map(|(from, to)| to - from).sum::<u64>() < 4 * MIB);
        let copy = dir.path().join(format!("copy.{format}"));
        prints("cp", &["--sparse=auto", &mount.arg(), &as_arg(&copy)]);
        let copied = fs::metadata(&copy).unwrap();
        assert_eq!(copied.len(), 64 * MIB);
        assert!(
            copied.blocks() * 512 < 4 * MIB,
            "{} blocks",
            copied.blocks()
        );
        prints("cmp", &[&mount.arg(), &as_arg(&copy)]);
        mount.stop();
    }
}

#[test]
fn writes_of_programs_are_in_the_image() {
    let dir = disk_dir();
    for format in ["raw", "qcow2"] {
        let image = make_image(dir.path(), format);
        let model = as_arg(&dir.path().join("model"));
        prints(
            "qemu-img",
            &["convert", "-f", format, "-O", "raw", &image, &model],
        );
        let mount = Mount::start(&image, &["--format", format, "--fuse-writable"]);
        for file in [&mount.arg(), &model] {
            // O_DIRECT.
            let direct = ["-f", "raw", "-t", "none", "-c", "write -P 9 1M 3M", file];
            prints("qemu-io", &direct);
            let (of, seek) = (format!("of={file}"), "seek=40");
            let dd = [
                "if=/dev/zero",
                &of,
                "bs=1M",
                seek,
                "count=2",
                "conv=notrunc",
            ];
            prints("dd", &[&dd[..], &["oflag=direct", "conv=fsync"]].concat());
            let handle = OpenOptions::new().write(true).open(file).unwrap();
            handle.write_all_at(b"unaligned", 5 * MIB - 3).unwrap();
            handle.write_all_at(&[7; 300 << 10], 20 * MIB + 1).unwrap();
            handle.sync_all().unwrap();
            drop(handle);
            prints("fallocate", &["--punch-hole", "-o", "1M", "-l", "1M", file]);
            prints(
                "fallocate",
                &["--zero-range", "-o", "2M", "-l", "100000", file],
            );
        }
        prints("cmp", &[&mount.arg(), &model]);
        mount.stop();
        let compare = ["compare", "-f", format, "-F", "raw", &image, &model];
        prints("qemu-img", &compare);
        if format == "qcow2" {
            prints("qemu-img", &["check", "-f", format, &image]);
        }
    }
}

#[test]
fn file_does_not_grow() {
    let mount = Mount::start("memory:1M", &["--fuse-writable"]);
    let file = OpenOptions::new().write(true).open(&mount.file).unwrap();
    let errno = |result: io::Result<()>| result.unwrap_err().raw_os_error().unwrap();
    // As much as there is room for.
    assert_eq!(file.write_at(&[1; 1000], MIB - 10).unwrap(), 10);
    assert_eq!(errno(file.write_all_at(&[1], MIB)), libc::ENOSPC);
    assert_eq!(errno(file.set_len(2 * MIB)), libc::EOPNOTSUPP);
    assert_eq!(errno(file.set_len(0)), libc::EOPNOTSUPP);
    file.set_len(MIB).unwrap();
    drop(file);
    // The disk can grow, and programs see it.
    stdout_of(&["resize", &mount.served.api(), "2M"]);
    assert_eq!(fs::metadata(&mount.file).unwrap().len(), 2 * MIB);
    let file = OpenOptions::new().write(true).open(&mount.file).unwrap();
    file.write_all_at(&[1; 1000], 2 * MIB - 1000).unwrap();
    drop(file);
    mount.stop();
}

#[test]
fn fio_finds_what_it_wrote_to_the_file() {
    let dir = disk_dir();
    let image = make_image(dir.path(), "qcow2");
    let args = ["--format", "qcow2", "--fuse-writable", "--iothreads", "2"];
    let mount = Mount::start(&image, &args);
    for (direct, engine) in [("1", "libaio"), ("0", "psync")] {
        let (file, direct) = (
            format!("--filename={}", mount.arg()),
            format!("--direct={direct}"),
        );
        let engine = format!("--ioengine={engine}");
        let fio = [
            "--name=verify",
            &file,
            &direct,
            &engine,
            "--rw=randrw",
            "--bsrange=4k-600k",
            "--blockalign=4k",
            "--iodepth=32",
            "--size=64M",
            "--io_size=64M",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--fsync=50",
            "--allow_file_create=0",
        ];
        prints("fio", &fio);
    }
    mount.stop();
    prints("qemu-img", &["check", "-f", "qcow2", &image]);
}

#[test]
fn a_killed_server_leaves_no_mount() {
    let mut mount = Mount::start("memory:1M", &["--fuse-writable"]);
    let file = File::open(&mount.file).unwrap();
    mount.served.signal("KILL");
    mount.served.end();
    eventually("the file is unmounted", || {
        (!is_mounted(&mount.file)).then_some(())
    });
    assert_eq!(fs::read(&mount.file).unwrap(), b"");
    let gone = file.read_at(&mut [0; 10], 0).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(libc::ENOTCONN));
}

#[test]
fn server_stops_while_the_file_is_open() {
    let mount = Mount::start("memory:1M", &[]);
    let file = File::open(&mount.file).unwrap();
    file.read_at(&mut [0; 10], 0).unwrap();
    mount.stop();
    let gone = file.read_at(&mut [0; 10], 0).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(libc::ENOTCONN));
}

#[test]
fn server_stops_although_the_disk_hangs() {
    let fault = "fault:hang=yes,op=read";
    let filter = ["--filter", fault, "--stop-timeout", "1s"];
    let mut mount = Mount::start("memory:1M", &filter);
    let dd = format!("if={}", mount.arg());
    let mut reader = Command::new("dd");
    let mut reader = Kept::spawn(reader.args([&dd, "of=/dev/null", "bs=4k", "count=1"]));
    eventually("a request hangs", || {
        (mount.stats()["in_flight"] == 1).then_some(())
    });
    let (status, _) = mount.served.terminate();
    assert_eq!(status, Some(1), "{}", mount.served.log());
    eventually("the file is unmounted", || {
        (!is_mounted(&mount.file)).then_some(())
    });
    assert!(!reader.0.wait().unwrap().success());
}

#[test]
fn disk_is_removed_with_its_mount() {
    let served = Served::waiting("", "sandbox = 'on'");
    let (api, file) = (served.api(), served.path("file"));
    let path = as_arg(&file);
    fs::write(&file, "").unwrap();
    let of_server = ["--server", &api];
    let add = ["disk", "add", "a", "memory:1M", "--fuse", &path];
    let add = [&add[..], &of_server].concat();
    let remove = [&["disk", "remove", "a"][..], &of_server].concat();
    let show = || stdout_of(&[&["disk", "show", "a"][..], &of_server].concat());
    stdout_of(&add);
    assert_eq!(fs::metadata(&file).unwrap().len(), MIB);
    let unused = format!("{path} (read-only, open 0 times)");
    assert!(show().contains(&unused), "{}", show());
    let handle = File::open(&file).unwrap();
    assert!(show().contains("open 1 times"), "{}", show());
    refused(1, &remove, &["programs by its file"]);
    stdout_of(&[&remove[..], &["--force"]].concat());
    assert!(!is_mounted(&file));
    assert!(handle.read_at(&mut [0; 10], 0).is_err());
    // Again, and without an open file.
    stdout_of(&add);
    assert_eq!(fs::metadata(&file).unwrap().len(), MIB);
    stdout_of(&remove);
    assert!(!is_mounted(&file));
}

/// Starts a process that opens the file for writing, and writes a byte at 200 when told to.
///
/// The test itself must not have the file open while the disk is frozen: the end of each handle
/// flushes the disk, also in children that inherit the handle.
fn writer(file: &Path) -> Child {
    let script = "
import os, sys
file = os.open(sys.argv[1], os.O_RDWR)
print('open', flush=True)
input()
os.pwrite(file, b'd', 200)
";
    let mut python = Command::new("python3");
    python.args(["-c", script]).arg(file);
    python.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut writer = python.spawn().unwrap();
    let mut line = String::new();
    let said = writer.stdout.as_mut().unwrap();
    BufReader::new(said).read_line(&mut line).unwrap();
    assert_eq!(line, "open\n");
    writer
}

#[test]
fn programs_wait_while_the_disk_is_frozen_or_changed() {
    let dir = disk_dir();
    let image = make_image(dir.path(), "qcow2");
    let mount = Mount::start(&image, &["--format", "qcow2", "--fuse-writable"]);
    let api = mount.served.api();
    let mut frozen = writer(&mount.file);
    stdout_of(&["disk", "freeze", &api]);
    frozen.stdin.take().unwrap().write_all(b"\n").unwrap();
    // The image is closed: others may lock it.
    prints("qemu-io", &["-f", "qcow2", "-c", "read 0 4k", &image]);
    assert!(frozen.try_wait().unwrap().is_none());
    stdout_of(&["disk", "thaw", &api]);
    assert!(frozen.wait().unwrap().success());
    let mut changed = writer(&mount.file);
    stdout_of(&["disk", "change", &api, "cache=writeback", "--transient"]);
    changed.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(changed.wait().unwrap().success());
    let mut byte = [0];
    let file = File::open(&mount.file).unwrap();
    file.read_exact_at(&mut byte, 200).unwrap();
    assert_eq!(&byte, b"d");
    drop(file);
    refused(1, &["upgrade", &api], &["--fuse", "mount"]);
    mount.stop();
    prints("qemu-img", &["check", "-f", "qcow2", &image]);
}

#[test]
fn mounts_that_are_impossible_are_refused() {
    let dir = disk_dir();
    let (image, none) = (dir.path().join("image"), dir.path().join("none"));
    fs::write(&image, vec![0; MIB as usize]).unwrap();
    let (image, none, folder) = (as_arg(&image), as_arg(&none), as_arg(dir.path()));
    let serve = |args: &[&str], words: &[&str]| {
        refused(1, &[&["serve", &image][..], args].concat(), words);
    };
    serve(&["--fuse", &none], &[&none, "no such file"]);
    serve(&["--fuse", &folder], &["not a regular file"]);
    serve(&["--fuse", &image], &["the disk's own image"]);
    let data = dir.path().join("data");
    fs::write(&data, "data").unwrap();
    serve(&["--fuse", &as_arg(&data)], &["not empty", "name an empty"]);
    serve(
        &["--fuse", &none, "--fuse-writable", "--readonly"],
        &["fuse-writable", "readonly"],
    );
    let alone = run(&["serve", &image, "--fuse-writable"]);
    assert_eq!(alone.status.code(), Some(2));
    let mount = Mount::start("memory:1M", &[]);
    serve(&["--fuse", &mount.arg()], &["already a mount point"]);
    mount.stop();
}

#[test]
fn a_user_without_privileges_mounts_a_disk() {
    let as_nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    for signal in ["TERM", "KILL"] {
        let dir = short_dir();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [dir.path(), &file] {
            chown(path, Some(65534), Some(65534)).unwrap();
        }
        // The user may have no access to the directory of the program.
        let copy = as_arg(&dir.path().join("fathom"));
        prints("cp", &[env!("CARGO_BIN_EXE_fathom"), &copy]);
        let mut command = Command::new("setpriv");
        command.args(as_nobody).env_remove("FATHOM_LOG");
        command.args([&copy, "serve", "memory:1M"]);
        command.arg("--fuse").arg(&file).arg("--api");
        command.arg(dir.path().join("c"));
        let mut served = Served::spawn(command, dir);
        served.wait_for("the API is at");
        // Not even root may look at it.
        let refused = File::open(&file).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
        let name = as_arg(&file);
        let count = [&as_nobody[..], &["wc", "-c", &name]].concat();
        let said = prints("setpriv", &count);
        assert!(said.starts_with("1048576"), "{said}");
        served.signal(signal);
        served.end();
        eventually("the file is unmounted", || {
            (!is_mounted(&file)).then_some(())
        });
    }
}
