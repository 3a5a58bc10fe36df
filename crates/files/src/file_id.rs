//! Identities of open image files, to detect a file that was replaced under its name.

use crate::gate;
use serde::{Deserialize, Serialize};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Identity of an open file, block device or image of a storage cluster.
///
/// The kernel reuses inode numbers of deleted files. Two identities can therefore be compared only
/// while at least one of the two files is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileId {
    /// A file that is no block device.
    File {
        /// Number of the device that contains the file (st_dev).
        device: u64,
        /// Inode number (st_ino).
        inode: u64,
    },
    /// A block device, under any path.
    Device {
        /// Number of the block device (st_rdev).
        number: u64,
    },
    /// An image that is not a file, by the identifier that its storage assigns.
    Named(String),
}

impl FileId {
    /// Returns the identity of the file with this metadata.
    pub fn of(metadata: &Metadata) -> FileId {
        match metadata.file_type().is_block_device() {
            true => FileId::Device {
                number: metadata.rdev(),
            },
            false => FileId::File {
                device: metadata.dev(),
                inode: metadata.ino(),
            },
        }
    }

    /// Returns the identity of the file at `path`.
    pub fn at(path: &Path) -> io::Result<FileId> {
        Ok(FileId::of(&gate::place(path)?.metadata()?))
    }
}

/// A file that a disk holds open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedFile {
    /// Number of images above the file in the backing chain; 0 is the disk's own image.
    pub depth: usize,
    /// Whether the file is the external data file of the image of that depth.
    pub is_data: bool,
    /// The name by which the file was opened.
    pub path: PathBuf,
    /// Identity of the file, to detect a replacement.
    pub id: FileId,
}

/// Fails if a file that is open `now` differs from the file that was open `before` in its place.
///
/// Images down to depth `by_depth` are compared by their places in the backing chain. Deeper images
/// are compared by their names, because a job may have removed images from the chain in between.
/// The error is one line for the user.
pub fn check_same(before: &[UsedFile], now: &[UsedFile], by_depth: usize) -> Result<(), String> {
    let is_replaced = |file: &&UsedFile| {
        let is_place = |other: &&UsedFile| match file.depth <= by_depth {
            true => (other.depth, other.is_data) == (file.depth, file.is_data),
            false => other.path == file.path,
        };
        { before.iter().find(is_place) }.is_some_and(|other| other.id != file.id)
    };
    match now.iter().find(is_replaced) {
        None => Ok(()),
        Some(file) => Err(format!(
            "{}: replaced by another file since the disk opened it; restore the open file under \
             this name, or copy the disk to a new image ('fathom mirror')",
            file.path.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn used(depth: usize, path: &Path) -> UsedFile {
        UsedFile {
            depth,
            is_data: false,
            path: path.to_owned(),
            id: FileId::at(path).unwrap(),
        }
    }

    fn make(names: [&str; 3]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = names.iter().map(|name| dir.path().join(name)).collect();
        paths.iter().for_each(|path| fs::write(path, "x").unwrap());
        (dir, paths)
    }

    #[test]
    fn file_replaced_by_name_is_another_file() {
        let (dir, paths) = make(["top", "middle", "base"]);
        let all = || -> Vec<_> { (0..).zip(&paths).map(|(n, path)| used(n, path)).collect() };
        let before = all();
        assert!(check_same(&before, &all(), 0).is_ok());
        for path in &paths {
            // The first file stays open under another name, so that no other file gets its inode.
            let aside = dir.path().join("aside");
            fs::rename(path, &aside).unwrap();
            fs::write(path, "x").unwrap();
            let error = check_same(&before, &all(), 0).unwrap_err();
            assert!(error.starts_with(&*path.to_string_lossy()), "{error}");
            fs::rename(&aside, path).unwrap();
            assert!(check_same(&before, &all(), 0).is_ok());
        }
    }

    #[test]
    fn images_below_are_compared_by_name() {
        let (_dir, paths) = make(["top", "middle", "base"]);
        let before: Vec<_> = (0..).zip(&paths).map(|(n, path)| used(n, path)).collect();
        // The middle image was committed into the base image.
        let now = [used(0, &paths[0]), used(1, &paths[2])];
        assert!(check_same(&before, &now, 0).is_ok());
        assert!(check_same(&before, &now, 1).is_err());
    }
}
