//! Two equal images: Fathom changes one, and qemu-img changes the other in the same way.

use crate::support::{as_arg, disk_dir, stdout_of};
use crate::{create, qemu_img};
use fathom_testing::Tried;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Size of both disks.
const SIZE: &str = "2M";

pub struct Pair {
    dir: TempDir,
}

/// Returns the first few elements, or all of them if FATHOM_ROUNDS is set.
pub fn sample<T>(all: &[T], few: usize) -> &[T] {
    match std::env::var_os("FATHOM_ROUNDS") {
        Some(_) => all,
        None => &all[..few],
    }
}

impl Pair {
    /// Creates a pair with options as for `create -o`. The images are empty, or compressed as a
    /// whole.
    ///
    /// `base` is a raw file next to them that is larger than their disks. `base.qcow2` has the same
    /// data in compressed clusters.
    pub fn new(options: &str, compressed: bool) -> Pair {
        let pair = Pair { dir: disk_dir() };
        let base: Vec<u8> = (0..5 << 20).map(|at: u32| (at / 700) as u8 | 1).collect();
        std::fs::write(pair.dir.path().join("base"), base).expect("a file");
        if options.contains("base.qcow2") {
            let path = |name: &str| as_arg(&pair.dir.path().join(name));
            let (base, image) = (path("base"), path("base.qcow2"));
            qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", &base, &image]);
        }
        let image = pair.path(0);
        create(
            &image,
            &["-q", "-f", "qcow2", "-o", &format!("size={SIZE},{options}")],
        );
        if compressed {
            let raw = as_arg(&pair.dir.path().join("raw"));
            std::fs::write(&raw, compressible(2 << 20)).expect("a file");
            let options = ["-c", "-f", "raw", "-O", "qcow2", "-o", options];
            qemu_img(&[&["convert"], &options[..], &[&raw, &image]].concat());
        }
        std::fs::copy(&image, pair.path(1)).expect("a copy");
        pair
    }

    /// Returns a copy of the pair.
    pub fn copy(&self) -> Pair {
        let pair = Pair { dir: disk_dir() };
        for name in ["0", "1", "base"] {
            let (from, to) = (self.dir.path(), pair.dir.path());
            std::fs::copy(from.join(name), to.join(name)).expect("a copy");
        }
        pair
    }

    pub fn path(&self, which: usize) -> String {
        as_arg(&self.dir.path().join(which.to_string()))
    }

    /// Runs a command on both images, by Fathom on the first and by QEMU on the second.
    ///
    /// `{}` stands for the image. Without it, the image is the last argument.
    pub fn both(&self, args: &[&str]) {
        self.run(args, false);
    }

    /// Like [`Pair::both`], but by QEMU on the first image and by Fathom on the second.
    pub fn swapped(&self, args: &[&str]) {
        self.run(args, true);
    }

    fn run(&self, args: &[&str], swapped: bool) {
        Tried::Comparisons.count(1);
        let with = |path: &str| -> Vec<String> {
            let mut args: Vec<String> = args.iter().map(|a| a.replace("{}", path)).collect();
            if !args.iter().any(|a| a == path) {
                args.push(path.to_owned());
            }
            args
        };
        let (mine, theirs) = (usize::from(swapped), usize::from(!swapped));
        let (own, other) = (with(&self.path(mine)), with(&self.path(theirs)));
        let own: Vec<&str> = own.iter().map(String::as_str).collect();
        let said = stdout_of(&[&["img"], &own[..]].concat());
        let other: Vec<&str> = other.iter().map(String::as_str).collect();
        assert_eq!(said, qemu_img(&other), "{args:?}");
        self.check(&format!("{args:?}"));
    }

    /// Asserts that both images are sound and that their disks are equal.
    pub fn check(&self, what: &str) {
        for which in [0, 1] {
            let path = self.path(which);
            let checked = Command::new("qemu-img").args(["check", &path]).output();
            let checked = checked.expect("qemu-img");
            let said = String::from_utf8_lossy(&checked.stdout);
            assert!(checked.status.success(), "{what}: {which}: {said}");
        }
        qemu_img(&["compare", &self.path(0), &self.path(1)]);
        assert_eq!(self.size(0), self.size(1), "{what}");
    }

    /// Returns the size of a disk in bytes.
    pub fn size(&self, which: usize) -> u64 {
        let said = qemu_img(&["info", "--output=json", &self.path(which)]);
        let info: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        info["virtual-size"].as_u64().expect("a size")
    }

    /// Runs qemu-io commands on both images.
    pub fn io(&self, commands: &[&str]) {
        (0..2).for_each(|which| io(&self.path(which), "qcow2", commands));
        self.check(&format!("{commands:?}"));
    }

    /// Returns the contents of the disk, or of a snapshot.
    pub fn disk(&self, which: usize, snapshot: Option<&str>) -> Vec<u8> {
        let raw: PathBuf = self.dir.path().join("read");
        let (image, out) = (self.path(which), as_arg(&raw));
        let name = snapshot.map(|name| format!("snapshot.name={name}"));
        let mut args = vec!["convert", "-f", "qcow2", "-O", "raw"];
        if let Some(name) = &name {
            args.extend(["-l", name]);
        }
        qemu_img(&[&args[..], &[&image, &out]].concat());
        std::fs::read(raw).expect("what was read")
    }

    /// Asserts that the snapshot has these contents in both images.
    pub fn snapshot_is(&self, name: &str, disk: &[u8]) {
        for which in [0, 1] {
            let read = self.disk(which, Some(name));
            assert!(read == disk, "snapshot {name} of {which} has changed");
        }
    }
}

/// Returns bytes that a compressor shrinks by a quarter, so that streams end at any offset.
fn compressible(len: usize) -> Vec<u8> {
    let mut state = 0x5eed_0ffa_7403_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8 & 0x3f
    };
    std::iter::repeat_with(next).take(len).collect()
}

pub fn io(path: &str, format: &str, commands: &[&str]) {
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let output = Command::new("qemu-io")
        .args(["-f", format])
        .args(commands)
        .arg(Path::new(path))
        .output()
        .expect("qemu-io is installed by `make setup`");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && !said.contains("failed"),
        "{said}"
    );
}
