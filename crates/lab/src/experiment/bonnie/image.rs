//! The image that bonnie++ has its files on: written in all its blocks, with a fresh file system.

use std::path::PathBuf;

use crate::bed::image;
use crate::error::Result;
use crate::host;
use crate::machine::FileSystem;
use crate::scratch::Scratch;

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

    /// Makes a file system, and forgets what was there. It leaves no work to the guest.
    ///
    /// # Errors
    /// When its program is missing or fails.
    pub fn format(&self, fs: FileSystem) -> Result<()> {
        let (options, path) = (fs.options(false), self.path());
        let path = path.to_string_lossy();
        let args: Vec<&str> = options.split(' ').chain([&*path]).collect();
        host::run(fs.maker(), &args).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_file_system_leaves_the_image_whole() {
        let image = Image::make(8 << 20).unwrap();
        for fs in [FileSystem::Ext4, FileSystem::Ext2] {
            image.format(fs).unwrap();
            let meta = std::fs::metadata(image.path()).unwrap();
            assert!(meta.blocks() * 512 >= 8 << 20, "{fs}: {meta:?}");
            // The other opinion is e2fsprogs'.
            host::run("e2fsck", &["-fn", &image.path().to_string_lossy()]).unwrap();
        }
    }
}
