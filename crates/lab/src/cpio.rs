//! Writes cpio archives in the "newc" format, which the kernel unpacks as its initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's tree).
//!
//! The lab has its own writer because an archive with a device node then needs no privilege.

const MODE_DIR: u32 = 0o040_000;
const MODE_FILE: u32 = 0o100_000;
const MODE_CHAR: u32 = 0o020_000;

/// A cpio archive in memory.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// Adds a directory. The parents of the directory must be added first.
    pub fn dir(&mut self, name: &str) {
        self.entry(name, MODE_DIR | 0o755, (0, 0), &[]);
    }

    /// Adds a file with the permission bits `mode`.
    pub fn file(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.entry(name, MODE_FILE | mode, (0, 0), data);
    }

    /// Adds a character device node.
    pub fn char_device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, MODE_CHAR | 0o600, (major, minor), &[]);
    }

    /// Appends the trailer and returns the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), data: &[u8]) {
        self.inode += 1;
        let size = u32::try_from(data.len()).expect("files of an initramfs are smaller than 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("a path is short");
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize
        // check
        let fields = [
            self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// The oracle is busybox's cpio, which shares no code with this writer.
    #[test]
    fn busybox_unpacks_what_was_packed() {
        let mut archive = Archive::default();
        archive.dir("bin");
        archive.file("bin/tool", 0o755, b"#!/bin/sh\n");
        archive.file("odd", 0o644, b"12345");
        let bytes = archive.finish();

        let dir = tempfile::tempdir().unwrap();
        let busybox = crate::host::program("busybox").unwrap();
        let mut child = Command::new(busybox)
            .args(["cpio", "-i", "-d"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(std::fs::read(dir.path().join("odd")).unwrap(), b"12345");
        let tool = dir.path().join("bin/tool");
        assert_eq!(std::fs::read(&tool).unwrap(), b"#!/bin/sh\n");
        let mode = std::os::unix::fs::PermissionsExt::mode(&tool.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o755);
    }
}
