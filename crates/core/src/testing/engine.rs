//! A minimal engine in which a worker can sleep; it has no files.

use crate::{Completion, Engine, FileId, Io, Token, Wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};

/// An engine that sleeps in poll(2).
#[derive(Default)]
pub struct PollEngine {
    watched: Vec<(RawFd, Token)>,
    /// `ready` always returns true.
    insists: bool,
}

impl PollEngine {
    /// Creates an engine, in the form in which a worker takes it.
    pub fn boxed() -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(PollEngine::default()))
    }

    /// Creates an engine that always claims to have a completion.
    pub fn insisting() -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(PollEngine {
            insists: true,
            ..PollEngine::default()
        }))
    }
}

impl Engine for PollEngine {
    fn name(&self) -> &'static str {
        "poll"
    }

    fn reserve(&mut self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn add_file(&mut self, _file: BorrowedFd<'_>) -> io::Result<FileId> {
        unreachable!("the disk has no file")
    }

    fn remove_file(&mut self, _file: FileId) {}

    unsafe fn push(&mut self, _io: Io, _token: Token) {
        unreachable!("the disk has no file")
    }

    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()> {
        self.watched.push((fd, token));
        Ok(())
    }

    fn unwatch(&mut self, fd: RawFd, token: Token) {
        self.watched.retain(|entry| *entry != (fd, token));
    }

    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        // SAFETY: a watched eventfd is open until it is unwatched.
        let borrow = |fd: &RawFd| unsafe { BorrowedFd::borrow_raw(*fd) };
        let mut polled: Vec<PollFd<'_>> = self
            .watched
            .iter()
            .map(|(fd, _)| PollFd::from_borrowed_fd(borrow(fd), PollFlags::IN))
            .collect();
        let timeout = match wait {
            Wait::No => Some(Timespec::default()),
            Wait::Forever => None,
            Wait::For(time) => Timespec::try_from(time).ok(),
        };
        poll(&mut polled, timeout.as_ref())?;
        for (entry, (fd, token)) in polled.iter().zip(&self.watched) {
            if !entry.revents().is_empty() {
                let _ = rustix::io::read(borrow(fd), &mut [0u8; 8]);
                out.push(Completion {
                    token: *token,
                    result: 0,
                });
            }
        }
        Ok(())
    }

    fn ready(&mut self) -> bool {
        self.insists
    }
}
