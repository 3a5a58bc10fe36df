//! How whoever waits for stripes hears of them: a worker, or a thread that blocks.

use super::wire::Run;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// One listener's.
pub(super) struct Bell {
    event: OwnedFd,
    /// It has been rung, and its owner has not looked since.
    is_rung: AtomicBool,
    failed: Mutex<Vec<Run>>,
}

/// More are not kept for somebody who does not look: what is left out is asked for, and told, again.
const MOST: usize = 1024;

impl Bell {
    pub(super) fn new() -> io::Result<Bell> {
        Ok(Bell {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_rung: AtomicBool::new(false),
            failed: Mutex::default(),
        })
    }

    /// Signalled when it is rung.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Something has changed; `failed`: these cannot be had.
    pub(super) fn ring(&self, failed: Option<Run>) {
        if let Some(run) = failed {
            let mut all = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            if all.len() < MOST {
                all.push(run);
            }
        }
        if !self.is_rung.swap(true, Ordering::SeqCst) {
            // An eventfd's counter cannot overflow by ones.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Its owner is about to look at everything: what has failed since the last time. (It is rung for what
    /// changes from now on.)
    pub(super) fn hear(&self) -> Vec<Run> {
        self.is_rung.store(false, Ordering::SeqCst);
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *failed)
    }

    /// For who blocks: until it is rung, or for so long.
    pub(super) fn wait(&self, within: Duration) {
        let mut fds = [PollFd::new(&self.event, PollFlags::IN)];
        let within = Timespec::try_from(within).ok();
        // Whoever waits looks in any case.
        if poll(&mut fds, within.as_ref()) == Ok(1) {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
    }
}

/// Whether two runs have a stripe in common.
pub(super) fn overlap(a: Run, b: Run) -> bool {
    let end = |run: Run| u64::from(run.0) + u64::from(run.1);
    u64::from(a.0) < end(b) && u64::from(b.0) < end(a)
}
