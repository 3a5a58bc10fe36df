//! The formats of images.

use std::fmt;

/// A format of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// VMware's format; "Virtual Disk Format" 5.0.
    Vmdk,
    /// Hyper-V's format; [MS-VHDX].
    Vhdx,
    /// VirtualBox's format, version 1.1.
    Vdi,
    /// Virtual PC's and Azure's format; "Virtual Hard Disk Image Format" 1.0.
    ///
    /// The image's creator determines which of its two sizes applies.
    Vhd,
    /// The same format, with a size field that the user chose.
    VhdSized(VhdSize),
}

/// The fields from which the size of a VHD image can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VhdSize {
    /// The field Current Size.
    Current,
    /// The geometry: cylinders, heads and sectors.
    Geometry,
}

impl Kind {
    /// All formats.
    pub const ALL: [Kind; 4] = [Kind::Vmdk, Kind::Vhdx, Kind::Vdi, Kind::Vhd];
    /// Number of bytes that [`Kind::of_start`] needs from the start of a file, or all if the file
    /// is shorter.
    pub const START: usize = 512;
    /// Returns the format of a file that starts with `start`.
    ///
    /// Only magic numbers are checked, so the file may still be something else.
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

    /// Returns the name for people, for example "VMDK".
    pub fn name(self) -> &'static str {
        match self {
            Kind::Vmdk => "VMDK",
            Kind::Vhdx => "VHDX",
            Kind::Vdi => "VDI",
            Kind::Vhd | Kind::VhdSized(_) => "VHD",
        }
    }

    /// Returns the name that QEMU's programs use, for example "vpc" for VHD.
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

/// Returns whether the file is a VMDK descriptor, which is a text file.
///
/// A descriptor has a fixed first line or, as in QEMU, a version line after comments and empty
/// lines.
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
