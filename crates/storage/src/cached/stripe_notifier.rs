//! Notifies a listener, a worker or a blocking thread, of stripes that have arrived or failed.

use super::wire::Run;
use fathom_core::EventNotifier;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The notification channel of one listener.
pub(super) struct StripeNotifier {
    event: EventNotifier,
    /// Whether a notification was sent that the listener has not processed.
    is_notified: AtomicBool,
    failed: Mutex<Vec<Run>>,
}

/// Maximum number of failed runs kept for a slow listener. Dropped ones are requested, and fail,
/// again.
const MOST: usize = 1024;

impl StripeNotifier {
    pub(super) fn new() -> io::Result<StripeNotifier> {
        Ok(StripeNotifier {
            event: EventNotifier::new()?,
            is_notified: AtomicBool::new(false),
            failed: Mutex::default(),
        })
    }

    /// Returns the eventfd that is signalled by each notification.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Notifies the listener of a change. `failed` is a run of stripes that cannot be fetched.
    pub(super) fn notify(&self, failed: Option<Run>) {
        if let Some(run) = failed {
            let mut all = self.failed.lock();
            if all.len() < MOST {
                all.push(run);
            }
        }
        if !self.is_notified.swap(true, Ordering::SeqCst) {
            self.event.notify();
        }
    }

    /// Returns the runs that have failed since the last call, and re-arms the notification. The
    /// listener then examines all of its state.
    pub(super) fn take_failed(&self) -> Vec<Run> {
        self.is_notified.store(false, Ordering::SeqCst);
        let mut failed = self.failed.lock();
        std::mem::take(&mut *failed)
    }

    /// Blocks until a notification arrives or the time is over.
    pub(super) fn wait(&self, within: Duration) {
        let mut fds = [PollFd::new(&self.event, PollFlags::IN)];
        let within = Timespec::try_from(within).ok();
        // The caller re-examines its state in either case.
        if poll(&mut fds, within.as_ref()) == Ok(1) {
            self.event.clear();
        }
    }
}

/// Whether two runs have a stripe in common.
pub(super) fn overlap(a: Run, b: Run) -> bool {
    let end = |run: Run| u64::from(run.0) + u64::from(run.1);
    u64::from(a.0) < end(b) && u64::from(b.0) < end(a)
}
