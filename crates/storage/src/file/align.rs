//! Determines the alignment that O_DIRECT demands of a file.

use rustix::fs::{AtFlags, StatxFlags, statx};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Alignment for direct I/O, in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Alignment of each buffer's address.
    pub(super) address: u32,
    /// Alignment of the offset and of each buffer's length.
    pub(super) block: u32,
}

/// Maximum plausible alignment in bytes; larger values are rejected.
const MAX: u32 = 65536;

/// Queries the kernel (since 6.1), or finds the alignment by trial reads. Returns None if the file
/// does not support direct I/O. `logical_block` is a block device's logical block size.
pub(super) fn probe(file: &File, logical_block: Option<u32>) -> io::Result<Option<Alignment>> {
    let stat = statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(stat) = stat
        && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let alignment = Alignment {
            address: stat.stx_dio_mem_align,
            block: stat.stx_dio_offset_align.max(512),
        };
        let sane = |n: u32| n.is_power_of_two() && n <= MAX;
        let usable = sane(alignment.address) && sane(alignment.block);
        return Ok(usable.then_some(alignment));
    }
    let block = match logical_block {
        Some(block) => Some(block),
        None => smallest_that_reads(file)?,
    };
    Ok(block.map(|block| Alignment {
        address: block,
        block,
    }))
}

/// Returns the smallest block that can be read to an address aligned to no more than its size.
/// Returns None if no block up to `MAX` can be read. Fails on any error other than EINVAL.
fn smallest_that_reads(file: &File) -> io::Result<Option<u32>> {
    let mut buffer = vec![0u8; 4 * MAX as usize];
    let start = buffer.as_ptr().align_offset(2 * MAX as usize);
    let mut block = 512;
    while block <= MAX {
        let len = block as usize;
        let at = &mut buffer[start + len..start + 2 * len];
        // SAFETY: `at` has room for `len` bytes.
        let n = unsafe { libc::pread(file.as_raw_fd(), at.as_mut_ptr().cast(), len, 0) };
        if n >= 0 {
            return Ok(Some(block));
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
        block *= 2;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn trying_and_asking_agree() {
        // Next to the test binary: the default temporary directory may be a memory file system.
        let exe = std::env::current_exe().expect("a path");
        let folder = exe.parent().expect("a folder");
        let file = tempfile::NamedTempFile::new_in(folder).expect("a file");
        file.as_file().set_len(1 << 20).expect("sized");
        let direct = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(file.path())
            .expect("a file system with direct I/O");
        let asked = probe(&direct, None).expect("asked").expect("direct I/O");
        let tried = smallest_that_reads(&direct).expect("tried");
        let tried = tried.expect("direct I/O");
        assert!(tried.is_power_of_two());
        assert!(tried >= asked.block && tried <= asked.block.max(asked.address).max(4096));
    }
}
