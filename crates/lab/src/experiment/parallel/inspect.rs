//! Inspection of a disk by an appliance: finds the file systems, mounts each to read it, reads how
//! full it is, and reads the package database.

use crate::error::{Error, Result};

const SCRIPT: &str = include_str!("inspect.sh");

/// Contents of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    pub file_systems: Vec<FileSystem>,
    /// The operating system's display name.
    pub os: String,
    /// Number of installed packages.
    pub packages: u64,
    /// Size of the package database, in bytes.
    pub bytes: u64,
}

/// A file system on a partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSystem {
    /// The kernel's name of the type.
    pub kind: String,
    /// Number of sectors of 512 bytes of the partition.
    pub sectors: u64,
}

/// Returns the guest's shell script, whose output is checked by [`check`].
pub fn script(device: &str) -> String {
    format!("device={device}\n{SCRIPT}")
}

/// Compares the output of an appliance with the contents of the disk.
///
/// # Errors
/// One line, if the appliance has found something else.
pub fn check(printed: &str, expected: &Contents) -> Result<()> {
    let found = parse(printed)
        .ok_or_else(|| Error::Protocol(format!("an inspection cannot have printed '{printed}'")))?;
    match found == *expected {
        true => Ok(()),
        false => Err(Error::Protocol(format!(
            "an appliance has found {found:?} on its disk, where {expected:?} is"
        ))),
    }
}

fn parse(printed: &str) -> Option<Contents> {
    let mut contents = Contents::default();
    for line in printed.lines() {
        match line.split_once(' ')? {
            ("fs", rest) => contents.file_systems.push(file_system(rest)?),
            ("os", name) => contents.os = name.to_owned(),
            ("packages", rest) => {
                let (packages, bytes) = rest.split_once(' ')?;
                contents.packages = packages.parse().ok()?;
                contents.bytes = bytes.parse().ok()?;
            }
            _ => return None,
        }
    }
    Some(contents)
}

/// Parses `vda1 18432 ext4 4096 2129 1837`: name, sectors, type; from statvfs(3) the block size,
/// the number of blocks, and the number of free blocks. Inconsistent numbers are rejected.
fn file_system(text: &str) -> Option<FileSystem> {
    let words: Vec<&str> = text.split(' ').collect();
    let [_, sectors, kind, block, blocks, free] = words.as_slice() else {
        return None;
    };
    let number = |text: &str| text.parse::<u64>().ok();
    let (sectors, blocks) = (number(sectors)?, number(blocks)?);
    let bytes = number(block)?.checked_mul(blocks)?;
    // The rest is used by the file system itself.
    let is_sound = bytes <= sectors * 512 && bytes >= sectors * 256 && number(free)? <= blocks;
    is_sound.then(|| FileSystem {
        kind: (*kind).to_owned(),
        sectors,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "fs vda1 18432 ext4 4096 2129 1837\nos Debian GNU/Linux 12 (bookworm)\n\
                           packages 480 712163\nfs vda2 32768 vfat 2048 8159 8159\n";

    fn expected() -> Contents {
        let file_system = |kind: &str, sectors| FileSystem {
            kind: kind.into(),
            sectors,
        };
        Contents {
            file_systems: vec![file_system("ext4", 18432), file_system("vfat", 32768)],
            os: "Debian GNU/Linux 12 (bookworm)".into(),
            packages: 480,
            bytes: 712_163,
        }
    }

    #[test]
    fn an_inspection_is_held_against_what_is_there() {
        check(PRINTED, &expected()).unwrap();
        for (from, to) in [
            ("packages 480", "packages 479"),
            ("712163", "712164"),
            ("ext4", "ext2"),
            ("18432", "18430"),
            ("bookworm", "trixie"),
            ("fs vda2 32768 vfat 2048 8159 8159\n", ""),
        ] {
            let wrong = PRINTED.replace(from, to);
            assert!(check(&wrong, &expected()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_no_inspection() {
        for (from, to) in [("2129 1837", "2129 2130"), ("4096", "8192"), ("4096", "1")] {
            let wrong = PRINTED.replace(from, to);
            let error = check(&wrong, &expected()).unwrap_err().to_string();
            assert!(error.contains("cannot have printed"), "{error}");
        }
    }
}
