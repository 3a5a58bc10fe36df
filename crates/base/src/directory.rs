//! All caches of this host: how much they take, and which are not in use.

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

/// The right to be an image's keeper, for as long as it is open.
pub fn lock(place: &Path) -> io::Result<Option<File>> {
    let file = cache::open(&place.join(LOCK))?;
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
    /// When it was last in use, as far as is known.
    pub used: SystemTime,
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
    let data = fs::metadata(place.join(cache::DATA)).ok();
    // A keeper makes its socket when it begins.
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

/// Removes one that nobody uses; false: somebody does.
pub fn remove(place: &Path) -> io::Result<bool> {
    let Some(lock) = lock(place)? else {
        return Ok(false);
    };
    // Who comes now waits for the lock, and begins anew: what is there is his, and nothing is there.
    About::forget(place)?;
    cache::forget(place)?;
    for name in [crate::profile::FILE, SOCKET, LOCK] {
        let _ = fs::remove_file(place.join(name));
    }
    let _ = fs::remove_dir(place);
    drop(lock);
    Ok(true)
}

/// What all caches but one's own take, and how many of them are in use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Others {
    pub taken: u64,
    pub used: u32,
}

/// Looks at the others, and makes room if they take too much: by those that nobody uses, the one that was not used
/// for longest first. What they were of stays known.
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
        // (What cannot be removed is the affair of who looks after the directory.)
        if let Ok(Some(_lock)) = lock(&other.place)
            && cache::forget(&other.place).is_ok()
        {
            all.taken -= other.taken;
        }
    }
    Ok(all)
}
