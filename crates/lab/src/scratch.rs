//! Folders that a run needs for a while: removed when it is done, when a signal ends it
//! ([`remove_all`]), and, of a run that was killed, by the next one ([`sweep`]).
//!
//! Who made a folder holds a lock on it for as long as it lives, whatever its process id means by
//! then: a folder that can be locked is nobody's.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use crate::control_groups;
use crate::error::{Context, Error, Result};

const PREFIX: &str = "fathom-scratch-";
/// On a disk: /tmp may be in memory.
const ON_DISK: &str = "/var/tmp";
/// A process that is just being ended may still write into a folder.
const ATTEMPTS: u32 = 5;

/// What a signal has to remove.
static LIVING: Mutex<Living> = Mutex::new(Living {
    folders: Vec::new(),
    is_ending: false,
});

struct Living {
    folders: Vec<PathBuf>,
    is_ending: bool,
}

/// A folder, removed on drop.
#[derive(Debug)]
pub(crate) struct Scratch {
    // Fields are dropped in order: nobody else may remove it while we do.
    dir: TempDir,
    _lock: File,
}

impl Scratch {
    /// For small files.
    pub fn small() -> Result<Scratch> {
        Scratch::within(&std::env::temp_dir())
    }

    /// For images.
    pub fn on_disk() -> Result<Scratch> {
        Scratch::within(disk())
    }

    /// A folder in `parent`.
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
            // Another run's sweep may have been faster.
            if let Some(lock) = lock(dir.path()) {
                living.folders.push(dir.path().to_owned());
                return Ok(Scratch { dir, _lock: lock });
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The folder's own name, which nothing else has: control groups of that name go with it.
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
    LIVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where folders for images are made.
pub(crate) fn disk() -> &'static Path {
    let disk = Path::new(ON_DISK);
    if disk.is_dir() { disk } else { Path::new(".") }
}

/// None when somebody else has it, or it is gone by now.
fn lock(path: &Path) -> Option<File> {
    let dir = File::open(path).ok()?;
    flock(&dir, FlockOperation::NonBlockingLockExclusive).ok()?;
    path.is_dir().then_some(dir)
}

/// Removes the folders of this process, for a signal that ends it; no more are made.
pub fn remove_all() {
    let mut living = living();
    living.is_ending = true;
    for path in std::mem::take(&mut living.folders) {
        remove(&path);
    }
}

/// Whether a signal is about to end this process: whatever fails now fails because of that.
pub fn is_ending() -> bool {
    living().is_ending
}

/// Removes the folders of this user's runs that were killed.
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

/// A folder of our own, not a link of somebody's to one.
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
        // Another run's sweep may be at it, which ours leaves it to.
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
