//! Holding back users who change a disk faster than somebody follows.

use crate::bells::Bells;
use fathom_core::Op;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// What a change that needs no data counts as, at most (bytes): it is as quickly followed.
const WITHOUT_DATA: u64 = 1 << 20;
/// What the smallest change counts as.
const LEAST: u64 = 4096;

/// Lets users change as many bytes as whoever follows says ([`Brake::allow`]). While it is *off* it holds back nobody.
#[derive(Default)]
pub struct Brake {
    is_on: AtomicBool,
    allowed: AtomicI64,
    /// How often something was allowed.
    progress: AtomicU64,
    problem: OnceLock<String>,
    bells: Bells,
}

impl Brake {
    /// So many bytes may be changed from now on, and no more.
    pub fn allow(&self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.allowed.store(bytes, Ordering::SeqCst);
        self.begin();
    }

    fn begin(&self) {
        self.is_on.store(true, Ordering::SeqCst);
        self.progress.fetch_add(1, Ordering::Relaxed);
        self.bells.ring();
    }

    /// So many more.
    pub fn allow_more(&self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let more = |now: i64| Some(now.max(0).saturating_add(bytes));
        let _ = self
            .allowed
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        self.begin();
    }

    /// Everything is allowed.
    pub fn release(&self) {
        self.is_on.store(false, Ordering::SeqCst);
        self.bells.ring();
    }

    /// Nobody has followed for too long: everything is allowed.
    pub(crate) fn give_up(&self, problem: String) {
        let _ = self.problem.set(problem);
        self.release();
    }

    /// Why it was given up.
    pub fn problem(&self) -> Option<&str> {
        self.problem.get().map(String::as_str)
    }

    /// Whether this may be done now; if so, it has been counted.
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
        // (As long as anything is allowed: a request may be longer than all that ever is.)
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

    /// This eventfd is signalled when somebody who waits is to look again.
    pub(crate) fn listen(&self, bell: &Arc<OwnedFd>) {
        self.bells.add(bell);
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
        // What was too much is not owed.
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
