//! Images of all kinds, created by QEMU.

use super::made::Made;
use super::support::{disk_dir, eventually};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// Size of each disk in bytes.
pub const SIZE: u64 = 12 << 20;

/// Options of qcow2 images in many combinations.
const QCOW2: &[&str] = &[
    "",
    "compat=0.10",
    "compat=0.10,cluster_size=512",
    "cluster_size=512,refcount_bits=1",
    "cluster_size=1k,refcount_bits=64",
    "cluster_size=4k,refcount_bits=2,lazy_refcounts=on",
    "cluster_size=8k,refcount_bits=8,compression_type=zstd",
    "cluster_size=16k,extended_l2=on",
    "cluster_size=32k,extended_l2=on,refcount_bits=32,compression_type=zstd",
    "cluster_size=2M",
    "cluster_size=2M,extended_l2=on,lazy_refcounts=on",
    "preallocation=metadata",
    "preallocation=metadata,extended_l2=on",
    "data_file=data.raw",
    "data_file=data.raw,data_file_raw=on",
    "data_file=data.raw,extended_l2=on,cluster_size=16k",
];

const QED: &[&str] = &[
    "",
    "cluster_size=4k",
    "cluster_size=4k,table_size=2",
    "cluster_size=1M,table_size=2",
];

pub const ENGINES: [&str; 3] = ["io_uring", "native", "threads"];

pub fn tool(dir: &Path, program: &str, args: &[&str]) -> Output {
    let run = Command::new(program).args(args).current_dir(dir).output();
    run.unwrap_or_else(|e| panic!("{program} is installed by `make setup`: {e}"))
}

/// Runs a tool, again and again while another process has locked the image.
///
/// A server releases the image a moment after its front-end disconnects, and the kernel a moment
/// after a kill.
pub fn patient_tool(dir: &Path, program: &str, args: &[&str]) -> Output {
    eventually("nobody has the image", || {
        let output = tool(dir, program, args);
        let errors = String::from_utf8_lossy(&output.stderr);
        let is_locked = errors.contains("Failed to get") && errors.contains("lock");
        (!is_locked).then_some(output)
    })
}

pub fn qemu_img(dir: &Path, args: &[&str]) -> String {
    let output = patient_tool(dir, "qemu-img", args);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {said}{errors}");
    said
}

pub fn qemu_io(dir: &Path, image: &str, format: &str, commands: &[&str]) {
    let mut args = vec!["-f", format];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(image);
    let output = patient_tool(dir, "qemu-io", &args);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && !said.contains("failed"),
        "{args:?}: {said}"
    );
}

/// A kind of image.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub format: &'static str,
    pub options: &'static str,
    pub number: usize,
}

impl Kind {
    pub fn all() -> impl Iterator<Item = Kind> {
        let qcow2 = QCOW2.iter().map(|options| ("qcow2", options));
        let all = qcow2.chain(QED.iter().map(|options| ("qed", options)));
        all.enumerate().map(|(number, (format, options))| Kind {
            format,
            options,
            number,
        })
    }

    pub fn has(&self, option: &str) -> bool {
        self.options.contains(option)
    }

    fn has_refcounts(&self, least: u32) -> bool {
        let narrow = [1, 2, 4, 8].into_iter().filter(|bits| *bits < least);
        let mut narrow = narrow.map(|bits| format!("refcount_bits={bits}"));
        !narrow.any(|option| self.options.split(',').any(|o| o == option))
    }

    fn is_qcow2(&self) -> bool {
        self.format == "qcow2"
    }

    /// Creates a directory for the image: on a disk or in memory.
    pub fn dir(&self) -> TempDir {
        match self.number / 2 % 2 {
            0 => disk_dir(),
            _ => tempfile::tempdir_in("/dev/shm").expect("a directory"),
        }
    }

    /// Returns the server's options, which vary so that all ways of doing I/O are used.
    pub fn serve_args(&self) -> Vec<&'static str> {
        let engine = ENGINES[self.number % 3];
        let mut args = vec!["--format", self.format, "--aio", engine];
        if self.number % 2 == 1 {
            args.extend(["--iothreads", "2"]);
        }
        match self.number % 5 {
            // Linux AIO would block.
            1 if engine != "native" => args.extend(["--cache", "writeback"]),
            2 if engine != "native" => args.extend(["--cache", "writethrough"]),
            3 => args.extend(["--metadata-cache", "64k"]),
            _ => {}
        }
        args
    }

    /// Returns the options for a writable disk; `data` is the external data file, if there is one.
    pub fn serve_writable<'a>(&self, data: &'a str) -> Vec<&'a str> {
        let mut args = self.serve_args();
        if self.has("data_file") {
            args.extend(["--data-file", data]);
        }
        args
    }

    /// Creates the image `i` with all features of its kind.
    ///
    /// QEMU creates each kind once, and later calls copy the files.
    pub fn make(&self, dir: &Path) {
        static MADE: Made<(&str, &str)> = Made::new();
        MADE.fill((self.format, self.options), dir, || self.make_by_qemu(dir));
    }

    fn make_by_qemu(&self, dir: &Path) {
        qemu_img(dir, &["create", "-q", "-f", "raw", "base", "9M"]);
        let stripes = ["write -P 0x11 0 5M", "write -P 0x12 6M 3M"];
        qemu_io(dir, "base", "raw", &stripes);
        let mut args = vec!["create", "-q", "-f", self.format];
        if !self.has("data_file_raw") && !self.has("preallocation") {
            args.extend(["-b", "base", "-F", "raw"]);
        }
        if !self.options.is_empty() {
            args.extend(["-o", self.options]);
        }
        qemu_img(dir, &[&args[..], &["i", "12M"]].concat());
        qemu_io(
            dir,
            "i",
            self.format,
            &["write -P 1 0 300k", "write -P 3 7500k 3k"],
        );
        if !self.is_qcow2() {
            return;
        }
        let zeroes = [
            "write -z 1100k 200k",
            "write -z -u 256k 128k",
            "discard 1M 32k",
        ];
        qemu_io(dir, "i", "qcow2", &zeroes);
        if self.has("data_file") {
            return;
        }
        // Compressed clusters share host clusters.
        if self.has_refcounts(16) && !self.has("preallocation") {
            let compressed = ["write -c -P 9 2M 2M", "write -c -P 8 10M 2M"];
            qemu_io(dir, "i", "qcow2", &compressed);
        }
        if self.has_refcounts(2) {
            qemu_img(dir, &["snapshot", "-c", "first", "i"]);
            qemu_io(
                dir,
                "i",
                "qcow2",
                &["write -P 5 100k 1M", "write -P 6 3M 70k"],
            );
        }
    }

    /// Returns what QEMU reads from the image, or from one of its snapshots.
    pub fn contents(&self, dir: &Path, snapshot: Option<&str>) -> Vec<u8> {
        let mut args = vec!["convert", "-f", self.format, "-O", "raw"];
        if let Some(name) = snapshot {
            args.extend(["-l", name]);
        }
        qemu_img(dir, &[&args[..], &["i", "read"]].concat());
        fs::read(dir.join("read")).unwrap()
    }

    pub fn snapshot(&self, dir: &Path) -> Option<Vec<u8>> {
        let has_one = self.is_qcow2() && !self.has("data_file") && self.has_refcounts(2);
        has_one.then(|| self.contents(dir, Some("first")))
    }

    /// Asserts that QEMU finds nothing wrong with the image, not even leaked clusters.
    pub fn is_clean(&self, dir: &Path) {
        let output = tool(dir, "qemu-img", &["check", "-f", self.format, "i"]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(0), "{self:?}: {said}");
    }
}
