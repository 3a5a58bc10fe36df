//! This machine's page cache: what of a file is there alone, and forgetting what need not be there.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::param::page_size;

use crate::error::{Context, Result};

/// cachestat(2), Linux 6.5; the same number on all architectures.
const CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of linux/mman.h: a length of 0 is up to the end.
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// `struct cachestat`: pages.
#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Bytes of a file or a block device that were written and have not reached its device: in whole
/// pages. `None`: this kernel cannot tell.
///
/// # Errors
/// When the file cannot be opened or looked at.
pub(crate) fn unwritten(path: &Path) -> Result<Option<u64>> {
    let file = File::open(path).context(|| format!("cannot open {}", path.display()))?;
    let range = Range {
        offset: 0,
        length: 0,
    };
    let mut stat = Stat::default();
    // SAFETY: the kernel reads a `Range` and writes a `Stat`, both of which outlive the call and
    // have its layout.
    let done = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &range, &mut stat, 0) };
    if done == 0 {
        let pages = stat.dirty + stat.writeback;
        return Ok(Some(pages * page_size() as u64));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOSYS | libc::EOPNOTSUPP) => Ok(None),
        _ => Err(error).context(|| format!("cannot look at the cache of {}", path.display())),
    }
}

/// Asks the kernel to forget what it has of a file or a block device, so that it is read from its
/// device again. What has not reached it stays.
///
/// # Errors
/// When the file cannot be opened.
pub(crate) fn forget(path: &Path) -> Result<()> {
    let what = || format!("cannot empty the cache of {}", path.display());
    let file = File::open(path).context(what)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
        .map_err(io::Error::from)
        .context(what)
}

/// Forgets all files and names that are in this machine's memory and on its devices, too.
///
/// # Errors
/// Without root's rights.
pub(crate) fn drop_all() -> Result<()> {
    const PATH: &str = "/proc/sys/vm/drop_caches";
    rustix::fs::sync(); // what is dirty stays
    fs::write(PATH, "3").context(|| format!("cannot write {PATH}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_is_written_is_in_memory_alone_until_it_is_flushed() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("file");
        let mut file = File::create(&path).unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        let Some(bytes) = unwritten(&path).unwrap() else {
            let release = crate::host::run("uname", &["-r"]).unwrap();
            let is_old = release.starts_with("5.") || release.starts_with("6.1");
            return assert!(is_old, "{release} can tell");
        };
        assert_eq!(bytes, 1 << 20);
        file.sync_data().unwrap();
        assert_eq!(unwritten(&path).unwrap(), Some(0));
        assert!(unwritten(&dir.path().join("missing")).is_err());
    }
}
