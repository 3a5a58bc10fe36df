//! A host with a cache, and a base image that is elsewhere.

use crate::support::nbd::Nbd;
use crate::support::{Kept, as_arg, disk_dir, eventually, fathom, listens, stdout_of};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// Size of the image in bytes.
pub const SIZE: u64 = 48 << 20;
/// Size in bytes of the unit that is fetched.
pub const STRIPE: u64 = 256 << 10;

/// The range in which no image has data.
const HOLE: std::ops::Range<u64> = 16 << 20..20 << 20;

/// A directory with `base.raw`, the images on top of it, and a cache. Dropping it kills its
/// keepers.
pub struct Host {
    pub dir: TempDir,
}

impl Host {
    pub fn new() -> Host {
        let host = Host { dir: disk_dir() };
        let file = File::create(host.path("base.raw")).unwrap();
        file.set_len(SIZE).unwrap();
        for stripe in (0..SIZE / STRIPE).filter(|stripe| !HOLE.contains(&(stripe * STRIPE))) {
            file.write_all_at(&noise(stripe), stripe * STRIPE).unwrap();
        }
        host
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn arg(&self, name: &str) -> String {
        as_arg(&self.path(name))
    }

    /// Creates a disk on top of `base`, which has that format.
    pub fn overlay(&self, name: &str, base: &str, format: &str) -> String {
        let image = self.arg(name);
        let size = SIZE.to_string();
        stdout_of(&[
            "img", "create", "-u", "-f", "qcow2", "-b", base, "-F", format, &image, &size,
        ]);
        image
    }

    /// Serves a disk on top of the image, with the cache of this host.
    pub fn serve(&self, disk: &str, base: &str, more: &[&str]) -> Nbd {
        let cache = self.arg("cache");
        let args = ["--format", "qcow2", "--base", base, "--base-cache", &cache];
        Nbd::start(disk, &[&args, more].concat())
    }

    /// Returns the process ids of the keepers of this host's images.
    pub fn keepers(&self) -> Vec<i32> {
        let cache = self.arg("cache");
        let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_ours = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            line.starts_with("fathom-base\0") && line.contains(&cache)
        };
        pids.filter(is_ours).collect()
    }

    /// Kills the keepers with SIGKILL. Returns how many there were.
    pub fn kill_keepers(&self) -> usize {
        let keepers = self.keepers();
        for keeper in &keepers {
            // SAFETY: kill(2) accesses no memory.
            unsafe { libc::kill(*keeper, libc::SIGKILL) };
        }
        keepers.len()
    }

    /// Returns what `fathom base list` reports for the only image.
    pub fn listed(&self) -> serde_json::Value {
        let all = stdout_of(&["base", "list", "--json", "--base-cache", &self.arg("cache")]);
        let mut all: serde_json::Value = serde_json::from_str(&all).unwrap();
        all["bases"]
            .get_mut(0)
            .map(serde_json::Value::take)
            .unwrap_or_default()
    }

    /// Returns how many bytes of the image are cached.
    pub fn kept(&self) -> u64 {
        self.listed()["taken"].as_u64().unwrap_or(0)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill_keepers();
    }
}

fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..STRIPE / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

/// A server of the image that logs all reads.
///
/// The server is nbdkit, or Fathom, which survives when its clients are killed.
pub struct Source {
    _child: Kept,
    socket: PathBuf,
    log: PathBuf,
}

impl Source {
    /// Serves `image` by nbdkit; each read takes `delay_ms` milliseconds.
    pub fn start(host: &Host, image: &Path, delay_ms: u32) -> Source {
        let mut nbdkit = Command::new("nbdkit");
        let filters = ["--filter=log", "--filter=delay"];
        nbdkit
            .args(["--foreground", "--readonly"])
            .args(filters)
            .arg("--unix");
        nbdkit.arg(host.path("source")).arg("file");
        nbdkit.arg(format!("file={}", image.display()));
        nbdkit.arg(format!("logfile={}", host.arg("source.log")));
        nbdkit.args(["logappend=true".into(), format!("rdelay={delay_ms}ms")]);
        Source::run(host, &mut nbdkit)
    }

    /// Serves `image` by Fathom; each read takes `delay_ms` milliseconds.
    pub fn sturdy(host: &Host, image: &Path, delay_ms: u32) -> Source {
        let mut server = fathom();
        server.arg("serve").arg(image).arg("--readonly");
        server.args(["--nbd", &format!("unix:{}", host.arg("source"))]);
        server.args(["--filter", &format!("delay:read={delay_ms}ms")]);
        server.args(["--filter", &format!("log:file={}", host.arg("source.log"))]);
        Source::run(host, server.args(["--api", &host.arg("source.api")]))
    }

    fn run(host: &Host, server: &mut Command) -> Source {
        let (socket, log) = (host.path("source"), host.path("source.log"));
        let _ = fs::remove_file(&socket);
        let child = Kept::spawn(server);
        eventually("it listens", || listens(&socket).then_some(()));
        Source {
            _child: child,
            socket,
            log,
        }
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Returns the offsets of all reads so far, in order.
    pub fn reads(&self) -> Vec<u64> {
        let log = fs::read_to_string(&self.log).unwrap();
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        };
        let nbdkits = |line: &str| {
            let (_, rest) = line.split_once(" Read id=")?.1.split_once("offset=")?;
            number(rest.split(' ').next()?)
        };
        let fathoms = |line: &str| {
            let (_, rest) = line.split_once(" read queue ")?.1.split_once(" offset ")?;
            number(rest.split(' ').next()?)
        };
        log.lines()
            .filter_map(|line| nbdkits(line).or_else(|| fathoms(line)))
            .collect()
    }
}

pub fn compare(a: &str, b: &str) -> Output {
    let args = ["compare", "-f", "raw", "-F", "raw", a, b];
    Command::new("qemu-img").args(args).output().unwrap()
}

/// Asserts that QEMU reads the same data from both.
pub fn same(a: &str, b: &str) {
    let compared = compare(a, b);
    assert!(compared.status.success(), "{compared:?}");
}

/// Reads or writes with qemu-io. Returns whether it succeeded.
pub fn qemu_io(uri: &str, command: &str) -> bool {
    let mut qemu_io = Command::new("qemu-io");
    if command.starts_with("read") {
        qemu_io.arg("-r");
    }
    let output = qemu_io
        .args(["-f", "raw", "-c", command, uri])
        .output()
        .unwrap();
    output.status.success()
}

/// Writes the same data to the disk and to a file.
pub fn write_both(uri: &str, file: &Path, at: u64, len: u64) {
    assert!(qemu_io(uri, &format!("write -P 0x5a {at} {len}")));
    let file = File::options().write(true).open(file).unwrap();
    file.write_all_at(&vec![0x5a; len as usize], at).unwrap();
}
