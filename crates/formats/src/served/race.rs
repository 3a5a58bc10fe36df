//! Lets a unit test do at a certain point what another thread could do there.

use std::cell::RefCell;

/// Where another thread may come in between.
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

/// Has this done when this thread reaches the point for the first time.
pub(super) fn at(point: Point, work: impl FnOnce() + 'static) {
    NEXT.set(Some((point, Box::new(work))));
}

/// Whether what was to be done at a point has been done.
pub(super) fn is_done() -> bool {
    NEXT.with_borrow(Option::is_none)
}

/// This thread has reached the point.
pub(super) fn reached(point: Point) {
    let is_meant = NEXT.with_borrow(|next| next.as_ref().is_some_and(|(at, _)| *at == point));
    if is_meant && let Some((_, work)) = NEXT.take() {
        work();
    }
}
