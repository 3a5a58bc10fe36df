//! A read-only disk with the host's own programs for the guest: fio, mkfs and their libraries.

use std::path::{Path, PathBuf};

use crate::disk_image::Contents;
use crate::error::Result;
use crate::host;

/// Programs that guests get in /usr/bin, beyond busybox: (the host's name, the guest's). Where
/// busybox has a command of the same name its shell prefers its own, unless the path is given.
const PROGRAMS: &[(&str, &str)] = &[
    ("fio", "fio"),
    ("mke2fs", "mkfs.ext4"),
    ("e2fsck", "fsck.ext4"),
    ("blkdiscard", "blkdiscard"),
];
/// Likewise, where this machine has them: an experiment that needs one says so.
const OPTIONAL: &[(&str, &str)] = &[
    ("mkfs.xfs", "mkfs.xfs"),
    ("mkfs.btrfs", "mkfs.btrfs"),
    ("bonnie++", "bonnie++"),
];
const CONFIGURATION: &[&str] = &["/etc/mke2fs.conf"];
/// The guest links these directories into its root, also where nothing is in them.
const DIRECTORIES: &[&str] = &["lib", "lib64", "usr/lib", "usr/sbin", "etc"];

/// The image, made when it is not in the cache yet: an updated fio makes a new one.
///
/// # Errors
/// When a program is missing or the image cannot be made.
pub fn image() -> Result<PathBuf> {
    let mut contents = Contents::default();
    for dir in DIRECTORIES {
        contents.dir(dir);
    }
    for (name, guest_name) in PROGRAMS {
        let program = host::program(name)?;
        contents.program(&program, &Path::new("usr/bin").join(guest_name))?;
    }
    for (name, guest_name) in OPTIONAL {
        if let Ok(program) = host::program(name) {
            contents.program(&program, &Path::new("usr/bin").join(guest_name))?;
        }
    }
    for path in CONFIGURATION {
        contents.file(Path::new(path));
    }
    contents.cached("tools")
}
