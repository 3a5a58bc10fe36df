//! Copy-before-write: a disk as it was at an instant, while it is changed.

use crate::blocks::grid_of;
use crate::notifiers::Notifiers;
use fathom_core::blocks::{Grid, are_set, bits, run, unset, unset_words};
use fathom_core::{EventNotifier, Op};
use parking_lot::{Condvar, Mutex};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Maximum blocks to save per call, and maximum of those for one request.
const AT_ONCE: u64 = 64;
const OF_ONE: u64 = 16;

/// The blocks of a disk whose original data has been saved before it is changed.
///
/// A saved block has a copy elsewhere and may be changed. A write to any other block waits until
/// the block is saved ([`Past::lets`]). The saving thread asks for the blocks for which writes
/// wait ([`Past::wanted`]). When the past is not needed any more, or cannot be saved, it is over
/// and no write waits: the disk's users take precedence.
///
/// A reader of the past reads the disk first, then asks which blocks are saved. Saved blocks may
/// have been changed before the read. All other blocks were not, since a change begins only after
/// the original data is saved.
pub struct Past {
    grid: Grid,
    kept: Box<[AtomicU64]>,
    /// Blocks for which writes wait, in order of arrival.
    waits: Mutex<Vec<Range<u64>>>,
    /// Signalled when a write begins to wait, and when saving begins or the past is over.
    news: Condvar,
    /// Whether writes wait and all earlier ones have completed: the instant of the past.
    is_held: AtomicBool,
    /// Whether blocks for which writes wait are to be saved.
    has_begun: AtomicBool,
    is_over: AtomicBool,
    problem: OnceLock<String>,
    /// Number of calls that saved blocks.
    progress: AtomicU64,
    notifiers: Notifiers,
}

impl Past {
    /// Creates the past of a disk of `size` bytes, with no blocks saved.
    pub fn new(size: u64) -> Past {
        let grid = grid_of(size);
        Past {
            grid,
            kept: unset_words(grid.count()),
            waits: Mutex::default(),
            news: Condvar::new(),
            is_held: AtomicBool::new(false),
            has_begun: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            problem: OnceLock::new(),
            progress: AtomicU64::new(0),
            notifiers: Notifiers::default(),
        }
    }

    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.grid.size
    }

    /// Records that no write is in flight, and that all later ones wait.
    pub(crate) fn hold(&self) {
        self.is_held.store(true, Ordering::SeqCst);
    }

    /// Returns whether all writes wait because saving has not begun.
    pub fn holds(&self) -> bool {
        self.is_held.load(Ordering::SeqCst) && !self.has_begun.load(Ordering::SeqCst)
    }

    /// Begins to save the blocks for which writes wait; until then writes only wait.
    pub fn begin(&self) {
        self.has_begun.store(true, Ordering::SeqCst);
        self.tell_news();
    }

    /// Returns whether the request may be submitted now.
    #[inline]
    pub(crate) fn lets(&self, op: Op, offset: u64, len: u64) -> bool {
        match op {
            Op::Read | Op::Flush | Op::BlockStatus => true,
            Op::Write | Op::Discard | Op::WriteZeroes => {
                are_set(&self.kept, self.grid.touched(offset, len)) || self.is_over()
            }
        }
    }

    /// Registers a write that waits; its worker checks again when its eventfd is signalled.
    pub(crate) fn want(&self, offset: u64, len: u64) {
        self.waits.lock().push(self.grid.touched(offset, len));
        self.news.notify_all();
    }

    /// Registers an eventfd, which is signalled when waiting writes must be checked again.
    pub(crate) fn listen(&self, notifier: &Arc<EventNotifier>) {
        self.notifiers.add(notifier);
    }

    /// Returns ranges to save for which writes wait, in bytes and whole blocks, without overlaps.
    ///
    /// If no such ranges exist, the function waits for a write for the time `within` at most.
    pub fn wanted(&self, within: Duration) -> Vec<Range<u64>> {
        let mut waits = self.waits.lock();
        let mut found = self.pieces(&mut waits);
        if found.is_empty() && !within.is_zero() && !self.is_over() {
            self.news.wait_for(&mut waits, within);
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
            // All blocks before the first unsaved one are saved.
            let first = unset(&self.kept, want.clone());
            later.extend(first.map(|first| first.start..want.end));
        }
        // The requests that had their turn come last the next time.
        waits.drain(..told);
        waits.append(&mut later);
        // Several writes may wait for the same blocks.
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

    /// Marks these whole blocks, given in bytes, as saved; they may be changed.
    pub fn keep(&self, range: Range<u64>) {
        // A reader that sees the bits also sees the saved data.
        for (word, mask) in bits(&self.kept, self.grid.within(range)) {
            word.fetch_or(mask, Ordering::AcqRel);
        }
        self.progress.fetch_add(1, Ordering::Relaxed);
        self.notifiers.notify();
    }

    /// Returns a number that changes whenever blocks have been saved.
    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Returns the first part of this range of bytes that is saved, or not, as `kept` says.
    pub fn part(&self, range: Range<u64>, kept: bool) -> Option<Range<u64>> {
        let len = range.end.saturating_sub(range.start);
        let blocks = self.grid.touched(range.start, len);
        let part = self.grid.bytes(run(&self.kept, blocks, kept)?);
        Some(part.start.max(range.start)..part.end.min(range.end))
    }

    /// Ends the past with this problem, because blocks cannot be saved.
    pub fn give_up(&self, problem: String) {
        if !self.is_over() && self.problem.set(problem).is_ok() {
            self.end();
        }
    }

    /// Ends the past, which no reader needs any more.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.tell_news();
        self.notifiers.notify();
    }

    fn tell_news(&self) {
        // Taking the lock makes sure that a thread about to wait sees the change or is woken.
        drop(self.waits.lock());
        self.news.notify_all();
    }

    /// Returns whether the past has ended, so that writes no longer wait.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Returns why blocks could not be saved.
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
