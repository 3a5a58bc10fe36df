//! Inspects and drops this machine's page cache.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::param::page_size;

use crate::error::{Context, Result};

/// cachestat(2), Linux 6.5; the same number on all architectures.
const CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of linux/mman.h. A length of 0 means up to the end of the file.
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// `struct cachestat` of linux/mman.h. All fields count pages.
#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Returns the bytes of a file or block device that were written but have not reached its device,
/// rounded to whole pages. Returns `None` if this kernel has no cachestat(2).
///
/// # Errors
/// When the file cannot be opened or inspected.
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

/// Asks the kernel to drop the cached pages of a file or block device, so that the next read goes
/// to the device. Dirty pages stay.
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

/// Syncs, then drops the page cache and all cached dentries and inodes of this machine.
///
/// # Errors
/// When the caller is not root.
pub(crate) fn drop_all() -> Result<()> {
    const PATH: &str = "/proc/sys/vm/drop_caches";
    rustix::fs::sync(); // drop_caches leaves dirty pages in place
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
