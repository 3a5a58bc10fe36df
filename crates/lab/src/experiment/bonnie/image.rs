//! The image with bonnie++'s files: all blocks are written, and the file system is new.

use std::path::PathBuf;

use crate::bed::image;
use crate::error::Result;
use crate::host;
use crate::machine::FileSystem;
use crate::scratch::Scratch;

/// The image of a run's cells, whose blocks are written once. Each cell makes a new file system.
#[derive(Debug)]
pub struct Image {
    dir: Scratch,
    bytes: u64,
}

impl Image {
    /// Creates the image and writes every block.
    ///
    /// # Errors
    /// If there is not enough space, or writing fails.
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

    /// Makes a new file system, which discards the old one and leaves no initialisation to the
    /// guest.
    ///
    /// # Errors
    /// If the mkfs program is missing or fails.
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
            // e2fsprogs are the independent reference.
            host::run("e2fsck", &["-fn", &image.path().to_string_lossy()]).unwrap();
        }
    }
}
