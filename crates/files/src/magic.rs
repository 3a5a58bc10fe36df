//! Image formats by their first bytes.
//!
//! A guest can write any of these into its raw disk, so they never decide how
//! an image is read: they only keep a user from serving by mistake an image's
//! container as the disk itself.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Formats that images of virtual machines come in, other than raw.
pub const FORMATS: [&str; 9] = [
    "qcow2",
    "qcow",
    "qed",
    "vmdk",
    "vhdx",
    "vpc",
    "vdi",
    "parallels",
    "luks",
];

/// Where a format's magic is. (A LUKS header is no container's: guests that
/// encrypt their whole disk write one.)
const MAGIC: [(&str, usize, &[u8]); 12] = [
    ("qcow2", 0, b"QFI\xfb\0\0\0\x02"),
    ("qcow2", 0, b"QFI\xfb\0\0\0\x03"),
    ("qcow", 0, b"QFI\xfb"),
    ("qed", 0, b"QED\0"),
    ("vmdk", 0, b"KDMV"),
    ("vmdk", 0, b"COWD"),
    ("vmdk", 0, b"# Disk DescriptorFile"),
    ("vhdx", 0, b"vhdxfile"),
    // A dynamic VHD; a fixed one is a raw disk with a footer.
    ("vpc", 0, b"conectix"),
    ("vdi", 64, b"\x7f\x10\xda\xbe"),
    ("parallels", 0, b"WithoutFreeSpace"),
    ("parallels", 0, b"WithouFreSpacExt"),
];

/// As many bytes of an image tell: whole blocks, for block devices and whatever else there is.
pub const START: usize = 4096;

/// The format that the image seems to have.
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

/// The format that an image seems to have that begins like this.
pub fn detect_in(start: &[u8]) -> Option<&'static str> {
    let found = |(_, at, magic): &&(&str, usize, &[u8])| {
        start.get(*at..).is_some_and(|s| s.starts_with(magic))
    };
    MAGIC.iter().find(found).map(|(format, _, _)| *format)
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
        assert_eq!(detect_in(b"LUKS\xba\xbe"), None);
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
        ] {
            let path = dir.path().join(format);
            let made = Command::new("qemu-img")
                .args(["create", "-q", "-f", format])
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
