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
/// For guests whose CPUs are sampled; its libraries are three times the size of all others'.
const PROFILER: &str = "perf";
const CONFIGURATION: &[&str] = &["/etc/mke2fs.conf"];
/// The guest links these directories into its root, also where nothing is in them.
const DIRECTORIES: &[&str] = &["lib", "lib64", "usr/lib", "usr/sbin", "etc"];

/// The image, made when it is not in the cache yet: an updated fio makes a new one. There is one
/// with the profiler, and one without.
///
/// # Errors
/// When a program is missing or the image cannot be made.
pub fn image(with_profiler: bool) -> Result<PathBuf> {
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
    if with_profiler {
        let program = host::program(PROFILER)?;
        contents.program(&program, &Path::new("usr/bin").join(PROFILER))?;
    }
    contents.cached(if with_profiler { "profiler" } else { "tools" })
}
