//! An engine's files, by number.

use fathom_core::FileId;
use std::os::fd::RawFd;

const FREE: RawFd = -1;

/// File descriptors by [`FileId`]. The owners of the descriptors keep them open.
#[derive(Default)]
pub(crate) struct Files {
    fds: Vec<RawFd>,
}

impl Files {
    /// Adds a descriptor under the lowest free number.
    pub(crate) fn add(&mut self, fd: RawFd) -> FileId {
        let free = self.fds.iter().position(|&fd| fd == FREE);
        let index = free.unwrap_or(self.fds.len());
        match free {
            Some(free) => self.fds[free] = fd,
            None => self.fds.push(fd),
        }
        FileId(index as u32)
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
    fn numbers_are_reused() {
        let mut files = Files::default();
        let ids: Vec<_> = (0..70).map(|fd| files.add(fd)).collect();
        assert_eq!(ids[69], FileId(69));
        files.remove(ids[7]);
        assert_eq!(files.add(100), ids[7]);
        assert_eq!(files.get(ids[7]), 100);
        assert_eq!(files.add(101), FileId(70));
    }
}
