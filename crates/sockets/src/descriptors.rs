//! Open files that a process hands over to its successor. The state that accompanies them has their
//! indexes in this list.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A list of open files. Each can be taken once.
#[derive(Debug, Default)]
pub struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    /// Adds a duplicate of a file. Returns its index.
    pub fn add(&mut self, fd: impl AsFd) -> io::Result<usize> {
        self.0.push(Some(fd.as_fd().try_clone_to_owned()?));
        Ok(self.0.len() - 1)
    }

    /// Adds a duplicate of a file, if there is one.
    pub fn add_any(&mut self, fd: Option<&impl AsFd>) -> io::Result<Option<usize>> {
        fd.map(|fd| self.add(fd)).transpose()
    }

    /// Takes the file with this index.
    pub fn take(&mut self, number: usize) -> Result<OwnedFd, String> {
        let taken = self.0.get_mut(number).and_then(Option::take);
        taken.ok_or_else(|| format!("no file descriptor {number}, or it was already used"))
    }

    /// Removes the first `count` files, and returns them as a list.
    pub fn split_off_front(&mut self, count: usize) -> Descriptors {
        let count = count.min(self.0.len());
        Descriptors(self.0.drain(..count).collect())
    }

    /// Adds the files of another list at the end.
    pub fn append(&mut self, mut more: Descriptors) {
        self.0.append(&mut more.0);
    }

    /// Returns the number of files, including those that were taken.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether no file was ever added.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The files that were not taken.
    pub fn iter(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().flatten().map(OwnedFd::as_fd)
    }
}

impl FromIterator<OwnedFd> for Descriptors {
    fn from_iter<T: IntoIterator<Item = OwnedFd>>(fds: T) -> Descriptors {
        Descriptors(fds.into_iter().map(Some).collect())
    }
}
