//! Where a disk's bitmaps are.

use super::header::Left;
use super::limits::check_bitmap_name;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// So long one who comes waits for one who is about to leave.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Clone)]
pub(crate) struct Place {
    /// The directory, which need not be there as long as there are none.
    pub(crate) dir: PathBuf,
    /// The image's file, if it is in one.
    pub(crate) image: Option<PathBuf>,
    /// Stands for what the disk is called, where other disks may be meant.
    pub(crate) of: Option<String>,
    /// The boot of this machine.
    pub(crate) boot: String,
}

impl Place {
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Nobody's bitmap: names do not begin like this.
    pub(super) fn next_path(&self, name: &str) -> PathBuf {
        self.dir.join(format!(".{name}.next"))
    }

    /// The directory is there, durably.
    pub(super) fn make(&self) -> io::Result<()> {
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made
                .and_then(|()| File::open(self.dir.parent().unwrap_or(Path::new(".")))?.sync_all()),
        }
    }

    /// As it is now.
    pub(crate) fn image(&self) -> Option<Left> {
        let found = fs::metadata(self.image.as_ref()?);
        found.ok().as_ref().map(Left::from)
    }

    /// The directory, for this process alone: another one that uses it is about to leave, or has the disk. None: there
    /// is none.
    pub(super) fn lock(&self) -> io::Result<Option<File>> {
        let dir = match File::open(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            dir => dir?,
        };
        let until = Instant::now() + PATIENCE;
        loop {
            match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                    sleep(Duration::from_millis(10));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(io::Error::other("another process uses them"));
                }
                locked => return Ok(locked.map(|()| Some(dir))?),
            }
        }
    }

    /// The bitmaps that are there; what nobody needs is removed.
    pub(super) fn names(&self, pending: &[(String, u64)]) -> io::Result<Vec<String>> {
        let needed = Vec::from_iter(pending.iter().map(|(name, _)| self.next_path(name)));
        let mut names = Vec::new();
        for file in fs::read_dir(&self.dir)? {
            let file = file?;
            let Ok(name) = file.file_name().into_string() else {
                continue;
            };
            if name.starts_with('.') && (name.ends_with(".next") || name.ends_with(".new")) {
                // The bitmap that it was to follow goes on in its place. (What cannot be removed is in nobody's way
                // until then.)
                if !needed.contains(&file.path()) {
                    let _ = fs::remove_file(file.path());
                }
            } else if check_bitmap_name(&name).is_ok() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }
}
