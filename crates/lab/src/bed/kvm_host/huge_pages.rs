//! Huge pages for the memory of the KVM host's own guests.
//!
//! For each page that a guest touches for the first time, KVM must map it, which takes an emulated
//! CPU about half a millisecond. A boot makes 36,000 such mappings with 4 KiB pages and 600 with
//! huge pages, which takes little more than half the time.

use std::fs;
use std::path::Path;

/// This machine's pool of huge pages of 2 MiB, the size that KVM maps at once.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
const PAGE_MIB: u64 = 2;

/// Reserves huge pages for `mib` MiB and returns whether enough are free. If the kernel has no such
/// pages, or not enough contiguous memory, guests run without them.
pub fn reserve(mib: u32) -> bool {
    reserve_in(Path::new(POOL), u64::from(mib).div_ceil(PAGE_MIB)).unwrap_or(false)
}

/// Returns `None` if the pool cannot be read or written. Pages of a guest that has just ended may
/// not be free yet, so the pool grows by the missing pages.
fn reserve_in(pool: &Path, pages: u64) -> Option<bool> {
    let read = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(pool.join(name)).ok()?;
        text.trim().parse().ok()
    };
    let missing = pages.saturating_sub(read("free_hugepages")?);
    if missing > 0 {
        let all = read("nr_hugepages")? + missing;
        fs::write(pool.join("nr_hugepages"), all.to_string()).ok()?;
    }
    Some(read("free_hugepages")? >= pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool of plain files, which does not grow when more pages are requested.
    fn pool(free: &str, all: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("free_hugepages"), free).unwrap();
        fs::write(dir.path().join("nr_hugepages"), all).unwrap();
        dir
    }

    #[test]
    fn free_pages_are_used_and_missing_ones_asked_for() {
        let asked = |dir: &Path| fs::read_to_string(dir.join("nr_hugepages")).unwrap();
        let enough = pool("256\n", "300\n");
        assert_eq!(reserve_in(enough.path(), 256), Some(true));
        assert_eq!(asked(enough.path()), "300\n");
        let short = pool("6\n", "300\n");
        assert_eq!(reserve_in(short.path(), 256), Some(false));
        assert_eq!(asked(short.path()), "550");
    }

    #[test]
    fn a_kernel_without_huge_pages_has_none() {
        assert_eq!(reserve_in(Path::new("/nonexistent"), 1), None);
    }
}
