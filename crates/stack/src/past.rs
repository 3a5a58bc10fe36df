//! A disk as it was at an instant, while it goes on being changed.

use crate::bells::Bells;
use crate::blocks::{BITS, Grid, are_set, bits, run, unset};
use fathom_core::Op;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Blocks that are told to whoever keeps them in one go, and of these those of one who waits: others wait, too.
const AT_ONCE: u64 = 64;
const OF_ONE: u64 = 16;

/// What of a disk is kept as it was, before it is changed.
///
/// A block that is *kept* is somewhere else, too, and may be changed. Who changes another one waits until it is
/// ([`Past::lets`]); whoever keeps them is told what is waited for ([`Past::wanted`]). When nobody wants the past
/// any more, or it cannot be kept, it is *over*, and nobody waits: the disk's users come first.
///
/// A reader of the past reads the disk, and asks afterwards what of it is kept: that may have been changed
/// before it was read. The rest was not, since a change begins after what was there is kept.
pub struct Past {
    grid: Grid,
    kept: Box<[AtomicU64]>,
    /// Blocks that somebody waits for, in the order in which they came.
    waits: Mutex<Vec<Range<u64>>>,
    /// Somebody has begun to wait, or it has begun, or is over.
    news: Condvar,
    /// Users wait, and what was in flight has ended: this is its instant.
    is_held: AtomicBool,
    /// What they wait for is to be kept.
    has_begun: AtomicBool,
    is_over: AtomicBool,
    problem: OnceLock<String>,
    /// How often something has been kept.
    progress: AtomicU64,
    bells: Bells,
}

impl Past {
    /// Of a disk of so many bytes, of which nothing is kept.
    pub fn new(size: u64) -> Past {
        let grid = Grid::new(size);
        let words = grid.count().div_ceil(BITS);
        Past {
            grid,
            kept: (0..words).map(|_| AtomicU64::new(0)).collect(),
            waits: Mutex::default(),
            news: Condvar::new(),
            is_held: AtomicBool::new(false),
            has_begun: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            problem: OnceLock::new(),
            progress: AtomicU64::new(0),
            bells: Bells::default(),
        }
    }

    pub fn size(&self) -> u64 {
        self.grid.size
    }

    /// Nothing of the disk is in flight, and nothing will be.
    pub(crate) fn hold(&self) {
        self.is_held.store(true, Ordering::SeqCst);
    }

    /// Users wait in any case, until it begins.
    pub fn holds(&self) -> bool {
        self.is_held.load(Ordering::SeqCst) && !self.has_begun.load(Ordering::SeqCst)
    }

    /// From now on what somebody waits for is to be kept: before, he only waits.
    pub fn begin(&self) {
        self.has_begun.store(true, Ordering::SeqCst);
        self.tell_news();
    }

    /// Whether this can be done to the disk now.
    #[inline]
    pub(crate) fn lets(&self, op: Op, offset: u64, len: u64) -> bool {
        match op {
            Op::Read | Op::Flush | Op::BlockStatus => true,
            Op::Write | Op::Discard | Op::WriteZeroes => {
                are_set(&self.kept, self.grid.touched(offset, len)) || self.is_over()
            }
        }
    }

    /// Somebody waits for these bytes to be kept, and looks again when his bell rings.
    pub(crate) fn want(&self, offset: u64, len: u64) {
        self.waits().push(self.grid.touched(offset, len));
        self.news.notify_all();
    }

    /// This eventfd is signalled when somebody who waits is to look again.
    pub(crate) fn listen(&self, bell: &Arc<OwnedFd>) {
        self.bells.add(bell);
    }

    fn waits(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is waited for and is to be kept: some of it (bytes, whole blocks, none of them twice). Waits so long
    /// for somebody.
    pub fn wanted(&self, within: Duration) -> Vec<Range<u64>> {
        let mut waits = self.waits();
        let mut found = self.pieces(&mut waits);
        if found.is_empty() && !within.is_zero() && !self.is_over() {
            let news = self.news.wait_timeout(waits, within);
            waits = news.unwrap_or_else(PoisonError::into_inner).0;
            found = self.pieces(&mut waits);
        }
        found
    }

    fn pieces(&self, waits: &mut Vec<Range<u64>>) -> Vec<Range<u64>> {
        let mut pieces: Vec<Range<u64>> = Vec::new();
        let mut left = AT_ONCE;
        if !self.has_begun.load(Ordering::SeqCst) {
            return pieces;
        }
        let mut later = Vec::new();
        let mut told = 0;
        for want in waits.iter_mut() {
            if left == 0 {
                break;
            }
            told += 1;
            let mut of_one = OF_ONE.min(left);
            let mut rest = want.clone();
            while of_one > 0
                && let Some(missing) = unset(&self.kept, rest.clone())
            {
                let end = missing.end.min(missing.start + of_one);
                of_one -= end - missing.start;
                left -= end - missing.start;
                rest.start = end;
                pieces.push(missing.start..end);
            }
            // What is before the first of them is kept.
            let first = unset(&self.kept, want.clone());
            later.extend(first.map(|first| first.start..want.end));
        }
        // Whose turn it was comes last the next time.
        waits.drain(..told);
        waits.append(&mut later);
        // Several may wait for the same.
        pieces.sort_by_key(|piece| piece.start);
        let mut apart: Vec<Range<u64>> = Vec::new();
        for piece in pieces {
            match apart.last_mut() {
                Some(last) if piece.start <= last.end => last.end = last.end.max(piece.end),
                _ => apart.push(piece),
            }
        }
        apart
            .into_iter()
            .map(|blocks| self.grid.bytes(blocks))
            .collect()
    }

    /// These bytes, whole blocks, are kept, and may be changed.
    pub fn keep(&self, range: Range<u64>) {
        // What was read of them, and written, is seen by whoever sees the bits.
        for (word, mask) in bits(&self.kept, self.grid.within(range)) {
            word.fetch_or(mask, Ordering::AcqRel);
        }
        self.progress.fetch_add(1, Ordering::Relaxed);
        self.bells.ring();
    }

    /// Changes whenever something has been kept.
    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// The first of these bytes that are kept, or are not, as far as they follow one another.
    pub fn part(&self, range: Range<u64>, kept: bool) -> Option<Range<u64>> {
        let len = range.end.saturating_sub(range.start);
        let blocks = self.grid.touched(range.start, len);
        let part = self.grid.bytes(run(&self.kept, blocks, kept)?);
        Some(part.start.max(range.start)..part.end.min(range.end))
    }

    /// It cannot be kept, for this reason: it is over.
    pub fn give_up(&self, problem: String) {
        if !self.is_over() && self.problem.set(problem).is_ok() {
            self.end();
        }
    }

    /// Nobody wants it any more.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.tell_news();
        self.bells.ring();
    }

    fn tell_news(&self) {
        // Whoever is about to wait for news sees them, or hears of them.
        drop(self.waits());
        self.news.notify_all();
    }

    #[inline]
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Why it could not be kept.
    pub fn problem(&self) -> Option<&str> {
        self.problem.get().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::SMALLEST as BLOCK;

    #[test]
    fn what_is_kept_may_be_changed_and_no_more() {
        let past = Past::new(100 * BLOCK - 512);
        let lets = |op, at, len| past.lets(op, at, len);
        assert!(lets(Op::Read, 0, BLOCK) && lets(Op::Flush, 0, 0) && !lets(Op::Write, 0, 1));
        past.keep(BLOCK..3 * BLOCK);
        assert!(lets(Op::Write, BLOCK, 2 * BLOCK) && !lets(Op::Write, BLOCK, 2 * BLOCK + 1));
        assert!(!lets(Op::Discard, BLOCK - 1, 2) && !lets(Op::WriteZeroes, 3 * BLOCK, 1));
        past.keep(99 * BLOCK..past.size());
        assert!(lets(Op::Write, 99 * BLOCK, BLOCK - 512));
        assert_eq!(past.part(0..u64::MAX, true), Some(BLOCK..3 * BLOCK));
        assert_eq!(
            past.part(BLOCK + 7..5 * BLOCK, false),
            Some(3 * BLOCK..5 * BLOCK)
        );
        assert_eq!(
            past.part(BLOCK + 7..BLOCK + 9, true),
            Some(BLOCK + 7..BLOCK + 9)
        );
        assert_eq!(past.part(5 * BLOCK..6 * BLOCK, true), None);
        assert_eq!(past.part(BLOCK + 7..BLOCK + 7, true), None);
        past.end();
        assert!(lets(Op::Write, 0, 100 * BLOCK) && past.problem().is_none());
    }

    #[test]
    fn what_several_wait_for_is_told_once() {
        let past = Past::new(1000 * BLOCK);
        let next = || past.wanted(Duration::ZERO);
        past.want(10 * BLOCK + 1, 2 * BLOCK);
        past.want(11 * BLOCK, BLOCK);
        past.want(0, 1);
        assert_eq!(next(), []);
        past.begin();
        assert_eq!(next(), [0..BLOCK, 10 * BLOCK..13 * BLOCK]);
        past.keep(11 * BLOCK..12 * BLOCK);
        assert_eq!(
            next(),
            [0..BLOCK, 10 * BLOCK..11 * BLOCK, 12 * BLOCK..13 * BLOCK]
        );
        past.keep(0..13 * BLOCK);
        assert_eq!(next(), []);
        past.want(100 * BLOCK, 500 * BLOCK);
        past.want(700 * BLOCK, 1);
        let first = 100 * BLOCK..116 * BLOCK;
        assert_eq!(next(), [first.clone(), 700 * BLOCK..701 * BLOCK]);
        past.keep(first);
        past.keep(700 * BLOCK..701 * BLOCK);
        assert_eq!(next().pop(), Some(116 * BLOCK..132 * BLOCK));
    }

    #[test]
    fn who_cannot_keep_it_says_why_once() {
        let past = Past::new(BLOCK);
        past.give_up("full".into());
        past.give_up("something else".into());
        assert_eq!((past.is_over(), past.problem()), (true, Some("full")));
        let ended = Past::new(BLOCK);
        ended.end();
        ended.give_up("too late".into());
        assert_eq!(ended.problem(), None);
    }
}
