//! A directory with the images of a test.

use crate::qemu_img;
use crate::support::nbd::tool;
use crate::support::{as_arg, disk_dir};
use std::fs;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

pub struct Place(pub TempDir);

impl Place {
    pub fn new() -> Place {
        Place(disk_dir())
    }

    pub fn path(&self, name: &str) -> String {
        as_arg(&self.0.path().join(name))
    }

    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let name = |e: fs::DirEntry| e.file_name().into_string().unwrap();
        let mut names: Vec<_> = entries.map(|e| name(e.unwrap())).collect();
        names.sort();
        names
    }

    /// Creates an image and writes to it with qemu-io.
    pub fn image(&self, name: &str, format: &str, args: &[&str], writes: &[&str]) -> String {
        let path = self.path(name);
        qemu_img(&[&["create", "-q", "-f", format], args, &[&path, "20M"]].concat());
        self.write(name, format, writes);
        path
    }

    pub fn write(&self, name: &str, format: &str, writes: &[&str]) {
        let mut args = vec!["-f", format];
        writes.iter().for_each(|write| args.extend(["-c", write]));
        let path = self.path(name);
        let done = tool(self.0.path(), "qemu-io", &[&args[..], &[&path]].concat());
        assert!(done.status.success(), "{done:?}");
    }

    /// Creates a base image and an overlay. Returns their paths. The raw file `before` has the same
    /// contents.
    pub fn chain(&self, format: &str) -> (String, String) {
        let writes = ["write -P 1 0 4M", "write -P 2 8M 1M", "write -z 12M 1M"];
        let base = self.image("base", "qcow2", &[], &writes);
        let on = ["-b", &base, "-F", "qcow2"];
        let writes = [
            "write -P 9 1M 64k",
            "write -z 8200k 100k",
            "write -P 8 18M 1000k",
            "write -P 7 3000k 512",
        ];
        let top = self.image("top", format, &on, &writes);
        let before = self.path("before");
        qemu_img(&["convert", "-f", format, "-O", "raw", &top, &before]);
        (base, top)
    }

    pub fn same(&self, format: &str, image: &str, raw: &str) {
        qemu_img(&["compare", "-f", format, "-F", "raw", image, raw]);
    }

    pub fn sound(&self, format: &str, image: &str) {
        if format != "raw" {
            qemu_img(&["check", "-q", "-f", format, image]);
        }
    }
}

/// Creates a raw disk with holes, zeroes, compressible data, and incompressible data.
///
/// The length of the disk is not a multiple of the cluster size.
pub fn raw(place: &Place, name: &str) -> String {
    let path = place.path(name);
    let mut file = fs::File::create(&path).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |len: usize| -> Vec<u8> {
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        std::iter::repeat_with(next).take(len).collect()
    };
    let at = |file: &mut fs::File, offset: u64, bytes: &[u8]| {
        std::os::unix::fs::FileExt::write_all_at(file, bytes, offset).unwrap();
    };
    at(&mut file, 0, &random(700_000));
    at(&mut file, 2 * MIB, &vec![0; 300_000]);
    at(&mut file, 3 * MIB + 512, &b"compressible ".repeat(40_000));
    at(&mut file, 7 * MIB - 1000, &random(3000));
    at(&mut file, 9 * MIB, &random(2_000_000));
    file.set_len(12 * MIB + 7 * 512).unwrap();
    at(&mut file, 12 * MIB + 6 * 512, &[5; 512]);
    path
}
