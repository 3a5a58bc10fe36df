//! The files that an engine knows, by number.

use fathom_core::FileId;
use std::io;
use std::os::fd::RawFd;

/// How many files one engine can know: an image and its backing files.
pub(crate) const MAX_FILES: usize = 64;

const FREE: RawFd = -1;

/// File descriptors by [`FileId`]. Their owners keep them open.
pub(crate) struct Files {
    fds: [RawFd; MAX_FILES],
}

impl Files {
    pub(crate) fn new() -> Files {
        Files {
            fds: [FREE; MAX_FILES],
        }
    }

    pub(crate) fn add(&mut self, fd: RawFd) -> io::Result<FileId> {
        let free = self.fds.iter().position(|&fd| fd == FREE);
        let index = free.ok_or_else(|| io::Error::from_raw_os_error(libc::ENFILE))?;
        self.fds[index] = fd;
        Ok(FileId(index as u32))
    }

    pub(crate) fn remove(&mut self, id: FileId) {
        self.fds[id.0 as usize] = FREE;
    }

    #[inline]
    pub(crate) fn get(&self, id: FileId) -> RawFd {
        self.fds[id.0 as usize]
    }

    pub(crate) fn all(&self) -> &[RawFd] {
        &self.fds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused_and_bounded() {
        let mut files = Files::new();
        let ids: Vec<_> = (0..MAX_FILES as RawFd)
            .map(|fd| files.add(fd).expect("room"))
            .collect();
        assert!(files.add(99).is_err());
        files.remove(ids[7]);
        assert_eq!(files.add(100).expect("room"), ids[7]);
        assert_eq!(files.get(ids[7]), 100);
    }
}
