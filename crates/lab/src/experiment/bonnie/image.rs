//! The image that bonnie++ has its files on: written in all its blocks, with a fresh file system.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::bed::image;
use crate::error::Result;
use crate::host;
use crate::scratch::Scratch;

/// A file system of the guest's, made on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fs {
    Ext4,
    Ext3,
    Ext2,
    Xfs,
    Btrfs,
}

impl Fs {
    const ALL: [Fs; 5] = [Fs::Ext4, Fs::Ext3, Fs::Ext2, Fs::Xfs, Fs::Btrfs];

    pub fn name(self) -> &'static str {
        match self {
            Fs::Ext4 => "ext4",
            Fs::Ext3 => "ext3",
            Fs::Ext2 => "ext2",
            Fs::Xfs => "xfs",
            Fs::Btrfs => "btrfs",
        }
    }

    /// The program that makes it, with what keeps it from giving the image's blocks back, and from
    /// leaving work to the guest.
    pub fn maker(self) -> (&'static str, &'static [&'static str]) {
        const NOW: &str = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";
        match self {
            Fs::Ext4 => ("mke2fs", &["-q", "-F", "-t", "ext4", "-E", NOW]),
            Fs::Ext3 => ("mke2fs", &["-q", "-F", "-t", "ext3", "-E", NOW]),
            Fs::Ext2 => ("mke2fs", &["-q", "-F", "-t", "ext2", "-E", NOW]),
            Fs::Xfs => ("mkfs.xfs", &["-q", "-f", "-K"]),
            Fs::Btrfs => ("mkfs.btrfs", &["-q", "-f", "-K"]),
        }
    }

    /// The guest's module, beyond those that every guest has; ext4's serves its predecessors.
    pub fn module(self) -> Option<&'static str> {
        match self {
            Fs::Ext4 | Fs::Ext3 | Fs::Ext2 => None,
            Fs::Xfs => Some("xfs"),
            Fs::Btrfs => Some("btrfs"),
        }
    }

    /// What it takes for itself at least.
    pub fn overhead(self) -> u64 {
        match self {
            Fs::Ext4 | Fs::Ext3 | Fs::Ext2 => 64 << 20,
            Fs::Xfs | Fs::Btrfs => 512 << 20,
        }
    }
}

impl fmt::Display for Fs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Fs {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Fs, String> {
        let found = Fs::ALL.into_iter().find(|fs| fs.name() == text);
        found.ok_or_else(|| format!("'{text}' is none of {}", Fs::ALL.map(Fs::name).join(", ")))
    }
}

/// The image of a run's cells: its blocks are written once, its file system is made for each.
#[derive(Debug)]
pub struct Image {
    dir: Scratch,
    bytes: u64,
}

impl Image {
    /// Writes every block.
    ///
    /// # Errors
    /// When there is no room, or it cannot be written.
    pub fn make(bytes: u64) -> Result<Image> {
        let image = Image {
            dir: Scratch::on_disk()?,
            bytes,
        };
        image::fill(&image.path(), bytes)?;
        Ok(image)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("disk.img")
    }

    /// Makes a file system, and forgets what was there.
    ///
    /// # Errors
    /// When its program is missing or fails.
    pub fn format(&self, fs: Fs) -> Result<()> {
        make(&self.path(), fs)
    }
}

fn make(image: &Path, fs: Fs) -> Result<()> {
    let (program, options) = fs.maker();
    let path = image.to_string_lossy();
    let args: Vec<&str> = options.iter().copied().chain([&*path]).collect();
    host::run(program, &args).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_file_system_leaves_the_image_whole() {
        let image = Image::make(8 << 20).unwrap();
        for fs in [Fs::Ext4, Fs::Ext2] {
            image.format(fs).unwrap();
            let meta = std::fs::metadata(image.path()).unwrap();
            assert!(meta.blocks() * 512 >= 8 << 20, "{fs}: {meta:?}");
            // The other opinion is e2fsprogs'.
            host::run("e2fsck", &["-fn", &image.path().to_string_lossy()]).unwrap();
        }
    }

    #[test]
    fn file_systems_are_read_as_they_are_written() {
        for fs in Fs::ALL {
            assert_eq!(fs.to_string().parse(), Ok(fs));
        }
        let error = "fat".parse::<Fs>().unwrap_err();
        assert_eq!(error, "'fat' is none of ext4, ext3, ext2, xfs, btrfs");
    }
}
