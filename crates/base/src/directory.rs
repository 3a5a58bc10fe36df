//! All caches of this host: how much they take, and which are not in use.

use crate::about::About;
use crate::cache;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, DirEntry, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const LOCK: &str = "lock";

/// The right to be an image's keeper, for as long as it is open.
pub fn lock(place: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    let file = options.open(place.join(LOCK))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        // Who had it may have removed it.
        Ok(()) => match fs::metadata(place.join(LOCK)) {
            Ok(meta) if meta.ino() == file.metadata()?.ino() => Ok(Some(file)),
            _ => Ok(None),
        },
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// One of them.
#[derive(Clone, Debug)]
pub struct Listed {
    pub about: About,
    pub place: PathBuf,
    /// Bytes of its file system that it takes.
    pub taken: u64,
    /// Somebody uses it.
    pub is_used: bool,
    /// When something was last added.
    pub changed: SystemTime,
}

/// Those in `dir`, in the order of their names; none, if it is not there.
pub fn list(dir: &Path) -> io::Result<Vec<Listed>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let all: io::Result<Vec<DirEntry>> = entries.collect();
    let mut all: Vec<Listed> = all?
        .iter()
        .filter_map(|entry| examine(&entry.path()))
        .collect();
    all.sort_by(|a, b| a.place.cmp(&b.place));
    Ok(all)
}

fn examine(place: &Path) -> Option<Listed> {
    let about = About::read(place).ok()??;
    let data = fs::metadata(place.join(cache::DATA)).ok()?;
    Some(Listed {
        about,
        place: place.to_owned(),
        taken: data.blocks() * 512,
        is_used: !matches!(lock(place), Ok(Some(_))),
        changed: data.modified().ok()?,
    })
}

/// Removes one that nobody uses; false: somebody does.
pub fn remove(place: &Path) -> io::Result<bool> {
    let Some(lock) = lock(place)? else {
        return Ok(false);
    };
    // Who comes now waits for the lock, and begins anew: what is there is his, and nothing is there.
    About::forget(place)?;
    cache::forget(place)?;
    for name in [crate::profile::FILE, "socket", LOCK] {
        let _ = fs::remove_file(place.join(name));
    }
    let _ = fs::remove_dir(place);
    drop(lock);
    Ok(true)
}

/// Makes room of at least so many bytes, by caches that nobody uses: the oldest first, as a whole. Returns what all
/// the others take then.
pub fn others(dir: &Path, own: &Path, too_many: impl Fn(u64) -> bool) -> io::Result<u64> {
    let mut others = list(dir)?;
    others.retain(|other| other.place != own);
    others.sort_by_key(|other| other.changed);
    let mut taken: u64 = others.iter().map(|other| other.taken).sum();
    for other in others.iter().filter(|other| !other.is_used) {
        if !too_many(taken) {
            break;
        }
        if remove(&other.place)? {
            taken -= other.taken;
        }
    }
    Ok(taken)
}
