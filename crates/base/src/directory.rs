//! All caches of this host: the space that they occupy, and whether they are in use.

use crate::about::About;
use crate::cache;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, DirEntry, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const LOCK: &str = "lock";
const SOCKET: &str = "socket";

/// Acquires the lock of an image's keeper, which is held until the file is closed.
///
/// Returns `None` if another process holds the lock.
pub fn lock(place: &Path) -> io::Result<Option<File>> {
    let file = cache::open(&place.join(LOCK))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        // The previous holder may have removed the lock file.
        Ok(()) => match fs::metadata(place.join(LOCK)) {
            Ok(meta) if meta.ino() == file.metadata()?.ino() => Ok(Some(file)),
            _ => Ok(None),
        },
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A cache.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Description of the image in the cache.
    pub about: About,
    /// Directory of the cache.
    pub place: PathBuf,
    /// Number of bytes that the data occupies in its file system.
    pub taken: u64,
    /// Whether a process uses the cache.
    pub is_used: bool,
    /// Time of the last known use.
    pub used: SystemTime,
}

/// Lists the caches in `dir`, ordered by name; none if the directory does not exist.
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
    let data = fs::metadata(place.join(cache::DATA)).ok();
    // A keeper creates its socket when it starts.
    let times = [
        data.as_ref().and_then(|data| data.modified().ok()),
        begun(place),
    ];
    Some(Listed {
        about,
        place: place.to_owned(),
        taken: data.map_or(0, |data| data.blocks() * 512),
        is_used: !matches!(lock(place), Ok(Some(_))),
        used: times
            .into_iter()
            .flatten()
            .max()
            .unwrap_or(SystemTime::UNIX_EPOCH),
    })
}

fn begun(place: &Path) -> Option<SystemTime> {
    fs::metadata(place.join(SOCKET)).ok()?.modified().ok()
}

/// Removes a cache. Returns false if it is in use.
pub fn remove(place: &Path) -> io::Result<bool> {
    let Some(lock) = lock(place)? else {
        return Ok(false);
    };
    // A new keeper waits for the lock and then starts with an empty cache.
    About::forget(place)?;
    cache::forget(place)?;
    for name in [crate::profile::FILE, SOCKET, LOCK] {
        let _ = fs::remove_file(place.join(name));
    }
    let _ = fs::remove_dir(place);
    drop(lock);
    Ok(true)
}

/// The space that all other caches occupy in bytes, and how many of them are in use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Others {
    pub taken: u64,
    pub used: u32,
}

/// Examines all other caches, and frees space if `too_many` says that they occupy too much.
///
/// Removes the data of unused caches, starting with the least recently used one. The descriptions
/// of these caches remain.
pub fn others(dir: &Path, own: &Path, too_many: impl Fn(u64) -> bool) -> io::Result<Others> {
    let mut others = list(dir)?;
    others.retain(|other| other.place != own && other.taken > 0);
    others.sort_by_key(|other| other.used);
    let mut all = Others {
        taken: others.iter().map(|other| other.taken).sum(),
        used: others.iter().filter(|other| other.is_used).count() as u32,
    };
    for other in others.iter().filter(|other| !other.is_used) {
        if !too_many(all.taken) {
            break;
        }
        // A cache that cannot be removed is left to the administrator.
        if let Ok(Some(_lock)) = lock(&other.place)
            && cache::forget(&other.place).is_ok()
        {
            all.taken -= other.taken;
        }
    }
    Ok(all)
}
