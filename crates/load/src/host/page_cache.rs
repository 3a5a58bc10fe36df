//! The page cache of a file that is loaded without O_DIRECT.

use std::fs::File;
use std::num::NonZeroU64;

use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fdatasync};

use crate::error::{Error, Result};
use crate::memory::PAGE;

/// Writes a range of a buffered file back, and drops it from the page cache, so that the next reads
/// come from the storage. Does nothing for a file with O_DIRECT.
///
/// The kernel keeps pages that another process has mapped, and all pages of a tmpfs.
pub fn drop_range(file: &File, offset: u64, len: u64) -> Result<()> {
    let failed = |e| Error::os("dropping a file from the page cache", e);
    if fcntl_getfl(file).map_err(failed)?.contains(OFlags::DIRECT) {
        return Ok(());
    }
    // The kernel does not drop pages that it has not written back.
    fdatasync(file).map_err(|e| Error::os("writing a file back", e))?;
    // The kernel drops only whole pages.
    let page = PAGE as u64;
    let start = offset / page * page;
    let end = (offset + len).next_multiple_of(page);
    fadvise(file, start, NonZeroU64::new(end - start), Advice::DontNeed).map_err(failed)
}
