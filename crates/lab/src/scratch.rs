//! Temporary folders of a run. A folder is removed when the run is done or when a signal ends it
//! ([`remove_all`]). The next run removes the folders of a killed run ([`sweep`]).
//!
//! The process that created a folder holds a lock on it while it lives, so a folder that can be
//! locked has no owner. Process ids would not show this, because they are reused.

use parking_lot::{Mutex, MutexGuard};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use crate::control_groups;
use crate::error::{Context, Error, Result};

const PREFIX: &str = "fathom-scratch-";
/// Parent of folders for images, which must be on a disk: /tmp may be in memory.
const ON_DISK: &str = "/var/tmp";
/// Attempts to remove a folder: a process that is just being ended may still write into it.
const ATTEMPTS: u32 = 5;

/// Folders that a signal handler must remove.
static LIVING: Mutex<Living> = Mutex::new(Living {
    folders: Vec::new(),
    is_ending: false,
});

struct Living {
    folders: Vec<PathBuf>,
    is_ending: bool,
}

/// A temporary folder, removed on drop.
#[derive(Debug)]
pub(crate) struct Scratch {
    // Fields are dropped in order: the lock keeps others from removing the folder during our
    // removal.
    dir: TempDir,
    _lock: File,
}

impl Scratch {
    /// Creates a folder for small files.
    pub fn small() -> Result<Scratch> {
        Scratch::within(&std::env::temp_dir())
    }

    /// Creates a folder for images.
    pub fn on_disk() -> Result<Scratch> {
        Scratch::within(disk())
    }

    /// Creates a folder in `parent`.
    pub fn within(parent: &Path) -> Result<Scratch> {
        let prefix = format!("{PREFIX}{}-", std::process::id());
        let what = || format!("cannot create a directory in {}", parent.display());
        loop {
            let mut living = living();
            if living.is_ending {
                return Err(Error::Protocol("the run was ended by a signal".into()));
            }
            let mut builder = tempfile::Builder::new();
            let dir = builder.prefix(&prefix).tempdir_in(parent).context(what)?;
            // Another run's sweep may have taken the lock first.
            if let Some(lock) = lock(dir.path()) {
                living.folders.push(dir.path().to_owned());
                return Ok(Scratch { dir, _lock: lock });
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the folder's unique name. [`remove_all`] and [`sweep`] also remove control groups of
    /// that name.
    pub fn name(&self) -> String {
        let name = self.path().file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let path = self.dir.path();
        living().folders.retain(|one| one != path);
    }
}

fn living() -> MutexGuard<'static, Living> {
    LIVING.lock()
}

/// Returns the parent of folders for images.
pub(crate) fn disk() -> &'static Path {
    let disk = Path::new(ON_DISK);
    if disk.is_dir() { disk } else { Path::new(".") }
}

/// Locks a folder. Returns `None` if another process holds the lock or the folder no longer exists.
fn lock(path: &Path) -> Option<File> {
    let dir = File::open(path).ok()?;
    flock(&dir, FlockOperation::NonBlockingLockExclusive).ok()?;
    path.is_dir().then_some(dir)
}

/// Removes the folders of this process, for a signal handler that ends it. No more can be created.
pub fn remove_all() {
    let mut living = living();
    living.is_ending = true;
    for path in std::mem::take(&mut living.folders) {
        remove(&path);
    }
}

/// Returns whether a signal is ending this process: later failures are consequences of that.
pub fn is_ending() -> bool {
    living().is_ending
}

/// Removes the folders that this user's killed runs have left.
pub fn sweep() {
    for parent in [&std::env::temp_dir(), disk()] {
        let entries = fs::read_dir(parent).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !name.starts_with(PREFIX) || !is_own(&path) {
                continue;
            }
            if let Some(lock) = lock(&path) {
                remove(&path);
                drop(lock);
            }
        }
    }
}

/// Returns whether the path is a folder of this user, not a symbolic link to one.
fn is_own(path: &Path) -> bool {
    let data = fs::symlink_metadata(path);
    data.is_ok_and(|data| data.is_dir() && data.uid() == rustix::process::geteuid().as_raw())
}

fn remove(path: &Path) {
    if let Some(name) = path.file_name() {
        control_groups::remove(&name.to_string_lossy());
    }
    for _ in 0..ATTEMPTS {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_holds_is_swept() {
        let held = Scratch::small().unwrap();
        fs::write(held.path().join("file"), "text").unwrap();
        let of_this_test = |what: &str| {
            let name = format!("{PREFIX}0-{what}-{}", std::process::id());
            std::env::temp_dir().join(name)
        };
        let left = of_this_test("left-by-nobody");
        fs::create_dir_all(left.join("inside")).unwrap();
        let target = tempfile::tempdir().unwrap();
        let link = of_this_test("link");
        std::os::unix::fs::symlink(target.path(), &link).unwrap();
        sweep();
        // Another run's sweep may hold the lock and remove it instead of ours.
        fathom_testing::until("the end of an old folder", || !left.exists());
        assert!(held.path().join("file").exists());
        assert!(target.path().exists());
        fs::remove_file(&link).unwrap();
        let path = held.path().to_owned();
        drop(held);
        assert!(!path.exists());
        assert!(!living().folders.contains(&path));
    }
}
