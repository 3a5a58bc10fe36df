//! Throttles users who change a disk faster than a mirror copies it.

use crate::notifiers::Notifiers;
use fathom_core::{EventNotifier, Op};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Maximum bytes that a request without data counts as, since it is copied as quickly.
const WITHOUT_DATA: u64 = 1 << 20;
/// Minimum bytes that a change counts as.
const LEAST: u64 = 4096;

/// Limits how many bytes users may change ([`Brake::allow`]). While it is off it limits nothing.
#[derive(Default)]
pub struct Brake {
    is_on: AtomicBool,
    allowed: AtomicI64,
    /// Number of calls that allowed something.
    progress: AtomicU64,
    problem: OnceLock<String>,
    notifiers: Notifiers,
}

impl Brake {
    /// Sets the number of bytes that may be changed from now on.
    pub fn allow(&self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.allowed.store(bytes, Ordering::SeqCst);
        self.begin();
    }

    fn begin(&self) {
        self.is_on.store(true, Ordering::SeqCst);
        self.progress.fetch_add(1, Ordering::Relaxed);
        self.notifiers.notify();
    }

    /// Adds to the number of bytes that may be changed.
    pub fn allow_more(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let more = |now: i64| Some(now.max(0).saturating_add(bytes));
        let _ = self
            .allowed
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        self.begin();
    }

    /// Ends throttling: all requests pass.
    pub fn release(&self) {
        self.is_on.store(false, Ordering::SeqCst);
        self.notifiers.notify();
    }

    /// Ends throttling for good, because the mirror has made no progress for too long.
    pub(crate) fn give_up(&self, problem: String) {
        let _ = self.problem.set(problem);
        self.release();
    }

    /// Returns why throttling was given up.
    pub fn problem(&self) -> Option<&str> {
        self.problem.get().map(String::as_str)
    }

    /// Returns whether the request may pass now; if so, counts it.
    #[inline]
    pub(crate) fn lets(&self, op: Op, len: u64) -> bool {
        let len = match op {
            Op::Read | Op::Flush | Op::BlockStatus => return true,
            Op::Write => len,
            Op::Discard | Op::WriteZeroes => len.min(WITHOUT_DATA),
        };
        if !self.is_on.load(Ordering::SeqCst) || self.problem.get().is_some() {
            return true;
        }
        // A request may be longer than any allowance, so it passes if any bytes are left.
        let is_allowed = self.allowed.load(Ordering::SeqCst) > 0;
        if is_allowed {
            self.allowed
                .fetch_sub(len.max(LEAST) as i64, Ordering::SeqCst);
        }
        is_allowed
    }

    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Registers an eventfd, which is signalled when waiting requests must be checked again.
    pub(crate) fn listen(&self, notifier: &Arc<EventNotifier>) {
        self.notifiers.add(notifier);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_changed_than_is_allowed() {
        let brake = Brake::default();
        assert!(brake.lets(Op::Write, u64::MAX));
        brake.allow(10_000);
        assert!(brake.lets(Op::Write, 4096) && brake.lets(Op::Write, 1));
        assert!(brake.lets(Op::Read, 1 << 30) && brake.lets(Op::Flush, 0));
        assert!(brake.lets(Op::Discard, 1 << 40));
        assert!(!brake.lets(Op::Write, 1) && brake.lets(Op::Read, 1));
        // An excess of the last request is not deducted.
        brake.allow_more(4096);
        assert!(brake.lets(Op::WriteZeroes, 512) && !brake.lets(Op::WriteZeroes, 512));
        brake.release();
        assert!(brake.lets(Op::Write, 1) && brake.problem().is_none());
        brake.allow(0);
        assert!(!brake.lets(Op::Write, 1));
        brake.give_up("slow".into());
        brake.allow(0);
        assert!(brake.lets(Op::Write, 1) && brake.problem() == Some("slow"));
    }
}
