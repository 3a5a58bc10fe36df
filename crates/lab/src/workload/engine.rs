//! Operations in flight.

use std::os::fd::BorrowedFd;

use super::aio::Aio;
use super::options::{Engine, Options};
use super::target::Memory;
use super::uring::Uring;
use crate::error::{Error, Result};

/// A finished operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub slot: u32,
    /// As the system call would have returned it.
    pub result: i64,
}

/// Keeps operations in flight. The memory and the file outlive it, and dropping it waits for the
/// kernel to be done with both.
pub(super) trait Flight {
    /// What it is called in a report.
    fn name(&self) -> &'static str;

    /// Prepares the operation of a slot that is not in flight, at `offset`.
    fn queue(&mut self, slot: u32, offset: u64);

    /// Hands what was queued to the kernel, and waits for at least `wait` to be finished.
    fn submit(&mut self, wait: u32) -> std::io::Result<()>;

    /// The next finished operation; None when no more are to be had without waiting.
    fn reap(&mut self) -> Option<Done>;
}

/// The engine that the options ask for.
pub(super) fn start<'a>(
    options: &Options,
    file: BorrowedFd<'a>,
    memory: &'a Memory,
) -> Result<Box<dyn Flight + 'a>> {
    let (write, depth) = (options.rw.is_write(), options.iodepth);
    let uring = || Uring::new(file, memory, write, depth);
    let aio = || Aio::new(file, memory, write, depth);
    match options.engine {
        Engine::IoUring => Ok(Box::new(uring().map_err(io_uring_refused)?)),
        Engine::Aio => Ok(Box::new(aio().map_err(aio_refused)?)),
        Engine::Auto => match uring() {
            Ok(uring) => Ok(Box::new(uring)),
            // Through the page cache, Linux AIO would be one operation at a time.
            Err(error) if !options.direct => Err(io_uring_refused(error)),
            Err(_) => Ok(Box::new(aio().map_err(aio_refused)?)),
        },
    }
}

fn io_uring_refused(source: std::io::Error) -> Error {
    Error::Io {
        what: "the kernel refuses io_uring (see /proc/sys/kernel/io_uring_disabled; a container's \
               seccomp filter may forbid it)"
            .into(),
        source,
    }
}

fn aio_refused(source: std::io::Error) -> Error {
    Error::Io {
        what: "the kernel refuses Linux AIO (see /proc/sys/fs/aio-max-nr)".into(),
        source,
    }
}
