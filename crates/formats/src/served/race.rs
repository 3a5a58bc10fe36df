//! Lets a unit test run code at a point where another thread could interfere.

use std::cell::RefCell;

/// A point at which another thread may interfere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    /// A worker is about to look up where a write goes.
    LookUp,
    /// An entry of an L2 table has just been published.
    Published,
}

type Work = Box<dyn FnOnce()>;

thread_local! {
    static NEXT: RefCell<Option<(Point, Work)>> = const { RefCell::new(None) };
}

/// Runs `work` when this thread first reaches the point.
pub(super) fn at(point: Point, work: impl FnOnce() + 'static) {
    NEXT.set(Some((point, Box::new(work))));
}

/// Returns whether the work for a point was done.
pub(super) fn is_done() -> bool {
    NEXT.with_borrow(Option::is_none)
}

/// Runs the work for this point, if there is any.
pub(super) fn reached(point: Point) {
    let is_meant = NEXT.with_borrow(|next| next.as_ref().is_some_and(|(at, _)| *at == point));
    if is_meant && let Some((_, work)) = NEXT.take() {
        work();
    }
}
