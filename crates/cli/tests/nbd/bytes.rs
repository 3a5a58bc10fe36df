//! Tests requests that do not consist of whole blocks.

use super::commands::PRELUDE;
use super::driver::{Driver, Request, with_disk};
use super::support::nbd::{Nbd, make_image, prints, python, tool};
use super::support::{as_arg, disk_dir, short_dir, stdout_of};
use fathom_testing::SetAtEnd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

const BYTES: &str = include_str!("bytes.py");
const SIZE: u64 = 64 << 20;
/// Offset of the blocks that are also written as a whole; see the script.
const SHARED: u64 = 2 << 20;

fn run(uri: &str, environment: &[(&str, &str)]) {
    let shared = SHARED.to_string();
    let all = [&[("URI", uri), ("SHARED", &shared)], environment].concat();
    python(&format!("{PRELUDE}{BYTES}"), &all);
}

/// Requests take a while, so that many overlap.
const SLOW: [&str; 2] = ["--filter", "delay:read=0ms..2ms,write=0ms..2ms"];

fn exercise(disk: &str, args: &[&str]) {
    let mut nbd = Nbd::start(disk, args);
    run(&nbd.uri(), &[]);
    assert_eq!(nbd.terminate().0, Some(0), "{}", nbd.log());
}

#[test]
fn no_byte_is_lost_in_memory() {
    exercise("memory:64M", &["--iothreads", "2"]);
    exercise("memory:64M", &[&["--iothreads", "3"][..], &SLOW].concat());
}

#[test]
fn no_byte_is_lost_in_files() {
    for aio in ["io_uring", "native", "threads"] {
        for cache in ["none", "writeback"]
            .iter()
            .filter(|c| aio != "native" || **c == "none")
        {
            let dir = disk_dir();
            let image = make_image(dir.path(), "raw", SIZE);
            let args = ["--aio", aio, "--cache", cache, "--iothreads", "2"];
            exercise(&image, &args);
            exercise(&image, &[&args, &SLOW[..]].concat());
        }
    }
}

#[test]
fn no_byte_is_lost_in_images() {
    for format in ["qcow2", "qed"] {
        let dir = disk_dir();
        let image = make_image(dir.path(), format, SIZE);
        let args = ["--format", format, "--iothreads", "2"];
        exercise(&image, &[&args, &SLOW[..]].concat());
        prints(
            dir.path(),
            "qemu-img",
            &["check", "-q", "-f", format, &image],
        );
    }
}

/// A process that is killed when dropped.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The server rejects requests that do not consist of its whole blocks.
#[test]
fn no_byte_is_lost_where_blocks_are_larger() {
    let dir = short_dir();
    let socket = dir.path().join("kit");
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["--foreground", "--filter=blocksize-policy", "--unix"]);
    nbdkit.arg(&socket).args(["memory", "64M"]);
    nbdkit.args(["blocksize-minimum=4096", "blocksize-preferred=4096"]);
    nbdkit.args(["blocksize-maximum=32M", "blocksize-error-policy=error"]);
    let nbdkit = nbdkit.stdin(Stdio::null()).spawn();
    let _nbdkit = Other(nbdkit.expect("nbdkit is installed by `make setup`"));
    super::support::eventually("nbdkit", || super::support::listens(&socket).then_some(()));
    let disk = format!("nbd+unix:///?socket={}", as_arg(&socket));
    let nbd = Nbd::start(&disk, &["--iothreads", "2"]);
    let info = prints(dir.path(), "nbdinfo", &["--json", &nbd.uri()]);
    assert!(info.contains(r#""block_size_minimum": 4096"#), "{info}");
    run(&nbd.uri(), &[]);
}

/// The guest writes whole blocks, one version after the other. The guest finds older versions only
/// where clients write.
#[test]
fn no_byte_is_lost_beside_a_virtual_machine() {
    let dir = disk_dir();
    let image = make_image(dir.path(), "raw", SIZE);
    for disk in ["memory:64M", &image] {
        let sockets = short_dir();
        let guest = as_arg(&sockets.path().join("v"));
        let args = [&["--vhost-user", &guest, "--iothreads", "2"][..], &SLOW].concat();
        let nbd = Nbd::start(disk, &args);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| with_disk(&guest, 2, |driver| write_versions(driver, &over)));
            let _end = SetAtEnd(&over);
            run(&nbd.uri(), &[("GUEST", "1")]);
        });
    }
}

/// The ranges of each block that clients write, as in the script.
const THEIRS: [(usize, usize); 5] = [(7, 100), (511, 2), (513, 1), (1500, 600), (4095, 1)];

fn write_versions(driver: &mut Driver<'_>, over: &AtomicBool) {
    const BLOCK: usize = 4096;
    let offsets = (0..8).map(|n| SHARED + n * BLOCK as u64);
    let is_theirs = |at: usize| THEIRS.iter().any(|(s, len)| (*s..s + len).contains(&at));
    let mut version = 0;
    while !over.load(Ordering::Relaxed) {
        version = version % 127 + 1;
        let writes = offsets.clone().map(|offset| Request::Write {
            offset,
            data: vec![version; BLOCK],
        });
        let written = driver.all(&writes.collect::<Vec<_>>());
        assert!(written.iter().all(Result::is_ok), "{written:?}");
        // A read-modify-write that has read before these writes writes back meanwhile.
        for _ in 0..3 {
            let reads = offsets
                .clone()
                .map(|offset| Request::Read { offset, len: BLOCK });
            for block in driver.all(&reads.collect::<Vec<_>>()) {
                let block = block.expect("read");
                let stale = (0..BLOCK).find(|at| !is_theirs(*at) && block[*at] != version);
                assert_eq!(stale, None, "not version {version}");
            }
        }
    }
}

/// If the rest of a block cannot be read, it is not replaced with other data.
#[test]
fn what_cannot_be_read_is_not_written_back() {
    let fault = "fault:error=EIO,op=read,range=4096+512";
    let nbd = Nbd::start("memory:1M", &["--filter", fault]);
    let script = "
h = connect(strict=False)
refused(lambda: h.pwrite(b'x' * 10, 4100), errno.EIO)
refused(lambda: h.pwrite(b'x' * 600, 3800), errno.EIO)
refused(lambda: h.zero(1000, 4100), errno.EIO)
h.pwrite(b'x' * 512, 4096)
h.pwrite(b'x' * 10, 5000)
assert h.pread(10, 5000) == b'x' * 10
";
    nbd.python(&format!("{PRELUDE}{script}"), &[]);
}

/// A durable write also makes the partial blocks at both ends durable.
#[test]
fn what_is_to_be_durable_is() {
    let nbd = Nbd::start("memory:1M", &["--filter", "fault:writes=lost"]);
    let written = "
h = connect(strict=False)
h.pwrite(b'y' * 65536, 0)
h.flush()
h.pwrite(b'z' * 10, 100, nbd.CMD_FLAG_FUA)
h.pwrite(b'z' * 3000, 8000, nbd.CMD_FLAG_FUA)
h.zero(700, 20100, nbd.CMD_FLAG_FUA)
h.zero(5000, 30100, nbd.CMD_FLAG_FUA)
h.pwrite(b'q' * 10, 200)
";
    nbd.python(&format!("{PRELUDE}{written}"), &[]);
    stdout_of(&["set", &nbd.api(), "fault", "power-cut=yes"]);
    let left = "
h = connect(strict=False)
model = bytearray(b'y' * 65536)
for what, length, at in [(b'z', 10, 100), (b'z', 3000, 8000), (b'\\0', 700, 20100), (b'\\0', 5000, 30100)]:
    model[at:at + length] = what * length
assert h.pread(65536, 0) == model
";
    nbd.python(&format!("{PRELUDE}{left}"), &[]);
}

/// More requests at once than there are buffers for partial blocks.
#[test]
fn any_number_of_bytes_is_written_at_once() {
    let slow = ["--filter", "delay:read=20ms"];
    let nbd = Nbd::start("memory:4M", &slow);
    let script = "
h = connect(strict=False)
for n in range(200):
    h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([n]) * 7), n * 4096 + 100)
while h.aio_in_flight() > 0:
    assert h.poll(60_000) == 1, 'nothing comes any more'
for n in range(200):
    assert h.pread(9, n * 4096 + 99) == b'\\0' + bytes([n]) * 7 + b'\\0', n
";
    nbd.python(&format!("{PRELUDE}{script}"), &[]);
}

/// QEMU's client, which sends only requests that the server's block sizes allow, and nbdcopy.
#[test]
fn others_read_and_write_bytes() {
    let dir = short_dir();
    let nbd = Nbd::start("memory:1M", &[]);
    let raw = format!("driver=raw,file.driver=nbd,file.path={}", nbd.arg("s"));
    let io = [
        "--image-opts",
        &raw,
        "-c",
        "write -P 7 4097 513",
        "-c",
        "read -P 7 4097 513",
    ];
    let args = [
        &io[..],
        &["-c", "read -P 0 4096 1", "-c", "read -P 0 4610 1"],
    ]
    .concat();
    prints(dir.path(), "qemu-io", &args);
    let file = dir.path().join("odd");
    std::fs::write(&file, vec![9; 70_001]).expect("a file");
    let copied = tool(dir.path(), "nbdcopy", &[&as_arg(&file), &nbd.uri()]);
    assert!(copied.status.success(), "{copied:?}");
    let last = ["-c", "read -P 9 0 70001", "-c", "read -P 0 70001 1"];
    prints(dir.path(), "qemu-io", &[&io[..2], &last].concat());
}

#[test]
fn bytes_of_a_disk_that_is_read_only_are_read() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    std::fs::write(&image, (0..8192u32).map(|n| n as u8).collect::<Vec<_>>()).expect("an image");
    let nbd = Nbd::start(&as_arg(&image), &["--readonly"]);
    let read = "
h = connect()
assert h.pread(300, 500) == bytes((500 + n) % 256 for n in range(300))
refused(lambda: h.pwrite(b'x', 1), errno.EPERM)
";
    nbd.python(&format!("{PRELUDE}{read}"), &[]);
}
