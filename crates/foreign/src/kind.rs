//! Which format an image has.

use std::fmt;

/// A format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// VMware's; "Virtual Disk Format" 5.0.
    Vmdk,
    /// Hyper-V's; [MS-VHDX].
    Vhdx,
    /// VirtualBox's, version 1.1.
    Vdi,
    /// Virtual PC's and Azure's; "Virtual Hard Disk Image Format" 1.0. The image's creator decides
    /// which of its two sizes counts.
    Vhd,
    /// Likewise, with the size that the user chose.
    VhdSized(VhdSize),
}

/// Which of its two sizes a VHD image has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VhdSize {
    /// The field Current Size.
    Current,
    /// Cylinders, heads and sectors.
    Geometry,
}

impl Kind {
    /// All formats.
    pub const ALL: [Kind; 4] = [Kind::Vmdk, Kind::Vhdx, Kind::Vdi, Kind::Vhd];
    /// Bytes of a file's start that [`Kind::of_start`] wants, or all if there
    /// are fewer.
    pub const START: usize = 512;
    /// The format of a file that starts with `start`. It may still turn out to
    /// be something else: only magic numbers are looked at.
    pub fn of_start(start: &[u8]) -> Option<Kind> {
        let has = |at: usize, magic: &[u8]| start.get(at..).is_some_and(|s| s.starts_with(magic));
        if has(0, b"KDMV") || has(0, b"COWD") || is_descriptor(start) {
            Some(Kind::Vmdk)
        } else if has(0, b"vhdxfile") {
            Some(Kind::Vhdx)
        } else if has(0, b"conectix") {
            Some(Kind::Vhd)
        } else if has(0x40, &[0x7f, 0x10, 0xda, 0xbe]) {
            Some(Kind::Vdi)
        } else {
            None
        }
    }

    /// Its name for people: "VMDK".
    pub fn name(self) -> &'static str {
        match self {
            Kind::Vmdk => "VMDK",
            Kind::Vhdx => "VHDX",
            Kind::Vdi => "VDI",
            Kind::Vhd | Kind::VhdSized(_) => "VHD",
        }
    }

    /// What QEMU's programs call it: "vpc" for VHD.
    pub fn qemu_name(self) -> &'static str {
        match self {
            Kind::Vmdk => "vmdk",
            Kind::Vhdx => "vhdx",
            Kind::Vdi => "vdi",
            Kind::Vhd | Kind::VhdSized(_) => "vpc",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether it is VMware's text file: by its first line or, as QEMU does, by a
/// line with the version that comes after comments and empty lines.
fn is_descriptor(start: &[u8]) -> bool {
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

    #[test]
    fn formats_are_known_by_their_magic_numbers() {
        let mut vdi = vec![0; 512];
        vdi[0x40..0x44].copy_from_slice(&0xbeda_107f_u32.to_le_bytes());
        let starts: [(&[u8], _); 10] = [
            (b"KDMV\x01", Some(Kind::Vmdk)),
            (b"COWD", Some(Kind::Vmdk)),
            (b"# Disk DescriptorFile\r\nversion", Some(Kind::Vmdk)),
            (b"# a comment\n \r\nversion=3\r\n", Some(Kind::Vmdk)),
            (b"# a comment\nversion=4\n", None),
            (b"vhdxfile", Some(Kind::Vhdx)),
            (b"conectix", Some(Kind::Vhd)),
            (&vdi, Some(Kind::Vdi)),
            (&vdi[..0x43], None),
            (b"", None),
        ];
        for (start, kind) in starts {
            assert_eq!(Kind::of_start(start), kind, "{start:?}");
        }
    }
}
