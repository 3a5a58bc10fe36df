//! Image formats.

use crate::{Error, Result};
use fathom_files::{ImageFile, magic};
use fathom_foreign::{Kind, VhdSize};
use fathom_units::unknown_name;
use std::fmt;

/// An image format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A raw image: the file's bytes are the disk's bytes.
    Raw,
    /// A qcow2 image. See [`crate::qcow2`].
    Qcow2,
    /// A QED image. See [`crate::qed`].
    Qed,
    /// A LUKS image: a header, followed by an encrypted raw disk.
    Luks,
    /// A foreign format, which is read-only.
    Foreign(Kind),
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 8] = [
        Format::Raw,
        Format::Qcow2,
        Format::Qed,
        Format::Luks,
        Format::Foreign(Kind::Vmdk),
        Format::Foreign(Kind::Vhdx),
        Format::Foreign(Kind::Vdi),
        Format::Foreign(Kind::Vhd),
    ];

    /// The format's name on the command line and in images.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Qed => "qed",
            Format::Luks => "luks",
            Format::Foreign(kind) => kind.qemu_name(),
        }
    }

    /// Whether the format has tables that map disk offsets to file offsets, and Fathom can read
    /// them.
    pub fn has_tables(self) -> bool {
        match self {
            Format::Raw | Format::Luks | Format::Foreign(_) => false,
            Format::Qcow2 | Format::Qed => true,
        }
    }

    /// Whether Fathom can only read the format.
    pub fn is_only_read(self) -> bool {
        matches!(self, Format::Foreign(_))
    }

    /// Returns the format with that name.
    pub fn from_name(name: &str) -> Result<Format> {
        let found = Format::ALL.into_iter().find(|f| f.name() == name);
        found.ok_or_else(|| {
            let names = Format::ALL.map(Format::name);
            let list =
                "formats are raw, qcow2, qed and luks, and for reading vmdk, vhdx, vdi and vpc";
            Error::unsupported(unknown_name("format", name, &names, list))
        })
    }

    /// Returns the VHD format with the disk size that QEMU's option `force_size_calc` selects.
    pub fn vhd_sized(size: &str) -> Result<Format> {
        let size = match size {
            "current_size" => VhdSize::Current,
            "chs" => VhdSize::Geometry,
            _ => {
                return Err(Error::usage(format!(
                    "force_size_calc: '{size}' is not current_size or chs"
                )));
            }
        };
        Ok(Format::Foreign(Kind::VhdSized(size)))
    }

    /// Detects the format from an image's first bytes, as `qemu-img` does. Only tools may use this
    /// function. A guest can write any first bytes to its raw disk, so these bytes must never
    /// choose the format in which a disk is served. Fails for a known format that is not supported.
    pub fn probe(file: &dyn ImageFile) -> Result<Format> {
        let mut start = [0; magic::START];
        file.read_at(&mut start, 0)
            .map_err(Error::io("cannot read the image"))?;
        let Some(name) = magic::detect_in(&start) else {
            return Ok(Format::Raw);
        };
        Format::from_name(name).map_err(|_| {
            Error::unsupported(format!(
                "looks like a {name} image, which is not supported; convert it (qemu-img convert \
                 -O qcow2), or name the format raw to use the file's own bytes"
            ))
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn probed(start: &[u8]) -> Result<Format> {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(start, 0).unwrap();
        Format::probe(&file)
    }

    #[test]
    fn probe_knows_the_magic_numbers_that_servers_refuse() {
        assert_eq!(probed(b"LUKS\xba\xbe\0\x01").unwrap(), Format::Luks);
        assert_eq!(probed(b"QFI\xfb\0\0\0\x02").unwrap(), Format::Qcow2);
        assert_eq!(probed(b"LUKS").unwrap(), Format::Raw);
        for start in [&b"QFI\xfb\0\0\0\x01"[..], b"WithoutFreeSpace"] {
            let error = probed(start).unwrap_err().to_string();
            assert!(error.contains("qemu-img convert"), "{error}");
        }
        let mut vdi = vec![0; 512];
        vdi[0x40..0x44].copy_from_slice(&0xbeda_107f_u32.to_le_bytes());
        let starts: [&[u8]; 5] = [b"KDMV", b"COWD", b"vhdxfile", b"conectix", &vdi];
        for start in starts {
            let kind = Kind::of_start(start).expect("a foreign format");
            assert_eq!(probed(start).unwrap(), Format::Foreign(kind));
        }
    }
}
