//! Builds a read-only disk with the host's programs for the guest: fio, mkfs and their libraries.

use std::path::{Path, PathBuf};

use crate::disk_image::Contents;
use crate::error::Result;
use crate::host;

/// Programs that guests get in /usr/bin in addition to busybox: (name on the host, name in the
/// guest). If busybox has a command of that name, its shell prefers its own unless the path is
/// given.
const PROGRAMS: &[(&str, &str)] = &[
    ("fio", "fio"),
    ("mke2fs", "mkfs.ext4"),
    ("e2fsck", "fsck.ext4"),
    ("blkdiscard", "blkdiscard"),
];
/// Further programs, if the host has them. An experiment that needs one checks for it.
const OPTIONAL: &[(&str, &str)] = &[
    ("mkfs.xfs", "mkfs.xfs"),
    ("mkfs.btrfs", "mkfs.btrfs"),
    ("bonnie++", "bonnie++"),
];
/// Profiler for guests whose CPUs are sampled. The profiler's libraries are three times the size of
/// all others.
const PROFILER: &str = "perf";
const CONFIGURATION: &[&str] = &["/etc/mke2fs.conf"];
/// Directories that the guest links into its root. The directories exist even if empty.
const DIRECTORIES: &[&str] = &["lib", "lib64", "usr/lib", "usr/sbin", "etc"];

/// Returns the image from the cache, or creates it. An updated program leads to a new image. The
/// images with and without the profiler are separate.
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
