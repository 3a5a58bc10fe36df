//! Detects image formats by their first bytes, with one list for servers and tools.
//!
//! A guest can write any of these bytes to its raw disk, so a server never chooses a format by
//! them. A server rejects such an image unless its user names the format. Tools open it as
//! `qemu-img` would.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Formats of virtual machine images other than raw, by QEMU's names.
pub const FORMATS: [&str; 12] = [
    "qcow2",
    "qcow",
    "qed",
    "vmdk",
    "vhdx",
    "vpc",
    "vdi",
    "parallels",
    "luks",
    "bochs",
    "cloop",
    "dmg",
];

/// Name of the LUKS format. A guest that encrypts its whole disk writes a LUKS header, too.
pub const LUKS: &str = "luks";

/// Magic number of each format, with its offset in the image. The first match counts.
const MAGIC: [(&str, usize, &[u8]); 13] = [
    // qcow version 1 only.
    ("qcow", 0, b"QFI\xfb\0\0\0\x01"),
    ("qcow2", 0, b"QFI\xfb"),
    ("qed", 0, b"QED\0"),
    ("vmdk", 0, b"KDMV"),
    ("vmdk", 0, b"COWD"),
    ("vhdx", 0, b"vhdxfile"),
    // A dynamic VHD. A fixed VHD is a raw disk with a footer.
    ("vpc", 0, b"conectix"),
    ("vdi", 64, b"\x7f\x10\xda\xbe"),
    ("parallels", 0, b"WithoutFreeSpace"),
    ("parallels", 0, b"WithouFreSpacExt"),
    (LUKS, 0, b"LUKS\xba\xbe"),
    ("bochs", 0, b"Bochs Virtual HD Image\0"),
    ("cloop", 0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop"),
];

/// Number of bytes that detection reads: whole blocks, as block devices require.
pub const START: usize = 4096;

/// Returns the format that the image seems to have.
pub fn detect(image: &File) -> io::Result<Option<&'static str>> {
    let mut start = [0; START];
    let mut len = 0;
    while len < start.len() {
        match image.read_at(&mut start[len..], len as u64) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(detect_in(&start[..len]))
}

/// Returns the format that an image with these first bytes seems to have.
pub fn detect_in(start: &[u8]) -> Option<&'static str> {
    let found = |(_, at, magic): &&(&str, usize, &[u8])| {
        start.get(*at..).is_some_and(|s| s.starts_with(magic))
    };
    let found = MAGIC.iter().find(found).map(|(format, _, _)| *format);
    found.or_else(|| is_vmdk_descriptor(start).then_some("vmdk"))
}

/// Returns whether the image is a VMware text descriptor.
///
/// A descriptor has a known first line. As in QEMU, a version line after comments and empty lines
/// counts, too.
fn is_vmdk_descriptor(start: &[u8]) -> bool {
    const FIRST: &[u8] = b"# Disk DescriptorFile";
    if { start.get(..FIRST.len()) }.is_some_and(|first| first.eq_ignore_ascii_case(FIRST)) {
        return true;
    }
    let mut lines = start.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    let first = lines.find(|line| !line.is_empty() && line[0] != b'#');
    matches!(first, Some(b"version=1" | b"version=2" | b"version=3"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn detect_in(start: &[u8]) -> Option<&'static str> {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(start, 0).unwrap();
        detect(&file).unwrap()
    }

    #[test]
    fn raw_images_have_no_magic() {
        assert_eq!(detect_in(b""), None);
        assert_eq!(detect_in(b"QE"), None);
        assert_eq!(detect_in(&[0; 8192]), None);
        assert_eq!(detect_in(b"LUKS\xba\xbd"), None);
        assert_eq!(detect_in(b"# a comment\nversion=4\n"), None);
    }

    #[test]
    fn magic_numbers_are_known() {
        for (start, format) in [
            (&b"LUKS\xba\xbe\0\x01"[..], "luks"),
            (b"LUKS\xba\xbe\0\x02", "luks"),
            (b"QFI\xfb\0\0\0\x01", "qcow"),
            (b"QFI\xfb\0\0\0\x03", "qcow2"),
            (b"QFI\xfb\0\0\0\x04", "qcow2"),
            (b"# disk descriptorfile\r\n", "vmdk"),
            (b"# a comment\n \r\nversion=3\r\n", "vmdk"),
            (b"Bochs Virtual HD Image\0", "bochs"),
        ] {
            assert_eq!(detect_in(start), Some(format));
        }
    }

    #[test]
    fn what_qemu_img_makes_is_known() {
        let dir = tempfile::tempdir().unwrap();
        for format in [
            "qcow2",
            "qcow",
            "qed",
            "vmdk",
            "vhdx",
            "vpc",
            "vdi",
            "parallels",
            "luks",
        ] {
            let path = dir.path().join(format);
            let made = Command::new("qemu-img")
                .args(["create", "-q", "-f", format])
                .args(match format {
                    "luks" => &[
                        "--object",
                        "secret,id=s,data=x",
                        "-o",
                        "key-secret=s,iter-time=10",
                    ][..],
                    _ => &[],
                })
                .arg(&path)
                .arg("64M")
                .status()
                .expect("qemu-img is installed by `make setup`");
            assert!(made.success(), "{format}");
            let found = detect(&File::open(&path).unwrap()).unwrap();
            assert_eq!(found, Some(format));
        }
    }
}
