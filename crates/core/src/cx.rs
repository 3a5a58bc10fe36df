//! The context that a worker passes to its channel and its sources.

use crate::engine::{Engine, Wait};
use crate::request::{Owner, Request, RequestId, Slab};
use crate::token::FIRST_NEW_TAG;
use fathom_trace::{Clock, Stage};
use probe::probe;
use std::io;

/// Passed with each call; owned by the worker.
pub struct Cx {
    /// The worker's requests in flight, and the children of its channel's layers.
    pub slab: Slab,
    /// Engine by which the worker and its channel do I/O.
    pub engine: Box<dyn Engine>,
    pub(crate) clock: &'static Clock,
    /// Time of the last tick.
    pub(crate) now: u64,
    pub(crate) done: Vec<RequestId>,
    /// Completed children that their owners have not taken yet, one list per owner.
    children_done: Vec<Vec<RequestId>>,
    /// The owner that was added last.
    newest: Owner,
    next_tag: u16,
    /// Children of all owners that were completed in this turn.
    pub(crate) children_completed: Vec<RequestId>,
    /// Number of children of all owners for which there is room.
    pub(crate) children: usize,
    /// Time at which the channel wants to be called, in ticks; `u64::MAX` for never.
    pub(crate) alarm: u64,
    /// New requests are popped.
    pub(crate) admits: bool,
    /// Number of requests that sources have answered with an error themselves.
    pub refused: u64,
    /// The channel wants to see requests again when they have been answered.
    pub(crate) watched: bool,
    /// Slots of the sources that are leaving.
    pub(crate) leaving: Vec<u16>,
}

impl Cx {
    /// Creates the context of a worker, without requests in flight.
    pub fn new(engine: Box<dyn Engine>) -> Cx {
        let clock = Clock::get();
        Cx {
            slab: Slab::default(),
            engine,
            clock,
            now: clock.now(),
            done: Vec::new(),
            children_done: Vec::new(),
            newest: Owner::SOURCE,
            next_tag: FIRST_NEW_TAG,
            children_completed: Vec::new(),
            children: 0,
            alarm: u64::MAX,
            admits: true,
            refused: 0,
            watched: false,
            leaving: Vec::new(),
        }
    }

    /// Makes room for `n` more children in flight, in addition to the requests of all sources.
    /// Returns their owner, which the caller stores in `owner` of each child. Fails if the channel
    /// has more layers than there are owner numbers.
    pub fn reserve_children(&mut self, n: usize) -> io::Result<Owner> {
        let owner = Owner::layer(self.children_done.len() + 1);
        let owner = owner.ok_or_else(|| io::Error::other("the disk has too many layers"))?;
        self.children += n;
        self.slab.grow(n);
        self.children_done.push(Vec::with_capacity(n));
        self.children_completed.reserve(self.children);
        self.engine.reserve(self.children)?;
        self.newest = owner;
        Ok(owner)
    }

    /// Returns a tag for [`Token::channel`](crate::Token::channel) that no other layer of the
    /// channel has. A layer above several others passes all of them the completions that it does
    /// not handle itself.
    pub fn new_tag(&mut self) -> u16 {
        let tag = self.next_tag;
        // Reused only after 32768 others: a channel has fewer layers.
        self.next_tag = tag.checked_add(1).unwrap_or(FIRST_NEW_TAG);
        tag
    }

    /// Returns the owner that was added last; [`Owner::SOURCE`] if no owner was added.
    pub fn newest_owner(&self) -> Owner {
        self.newest
    }

    /// Calls `look` with each request and child in a slot in use, in no particular order. Slow,
    /// because it examines the whole slab.
    #[cold]
    pub fn for_each_in_flight(&self, mut look: impl FnMut(&Request)) {
        for id in self.slab.in_use() {
            look(&self.slab[id]);
        }
    }

    /// Takes a completed child of `owner`; its outcome is in `error`. The layer that created the
    /// child releases its slot.
    #[inline]
    pub fn child_done(&mut self, owner: Owner) -> Option<RequestId> {
        self.children_done[owner.index()?].pop()
    }

    /// Returns whether [`Cx::child_done`] has a completed child of `owner` to return.
    #[inline]
    pub fn has_child_done(&self, owner: Owner) -> bool {
        owner
            .index()
            .is_some_and(|index| !self.children_done[index].is_empty())
    }

    /// Returns the current position in the sequence of completions.
    #[inline]
    pub fn mark(&self) -> Mark {
        Mark {
            done: self.done.len(),
            children: self.children_completed.len(),
        }
    }

    /// Returns the requests of sources and of all owners that were completed since the mark. For a
    /// layer that keeps track of the requests it has passed on. The layer calls this function after
    /// each call of the layer below and before it returns to the layer above. From then on, a
    /// child's owner may reuse the slot.
    #[inline]
    pub fn completed_since(&self, mark: Mark) -> Completed {
        Completed {
            next: mark,
            end: self.mark(),
        }
    }

    /// Reverts those completions since the mark for which `stands` returns false. These requests
    /// are in flight in [`Stage::Device`] again, and are appended to `back`. For a channel that
    /// finds out, once its data has arrived, that the data is outdated; called before any other
    /// layer sees the completion.
    #[inline]
    pub fn take_back(
        &mut self,
        since: Mark,
        mut stands: impl FnMut(RequestId, &Request) -> bool,
        back: &mut Vec<RequestId>,
    ) {
        let from = back.len();
        let mut completed = self.completed_since(since);
        while let Some(id) = completed.next(self) {
            if !stands(id, &self.slab[id]) {
                back.push(id);
            }
        }
        for &id in &back[from..] {
            self.undo(id, since);
        }
    }

    #[cold]
    fn undo(&mut self, id: RequestId, since: Mark) {
        let (is_child, list, from) = match self.slab[id].owner.index() {
            Some(owner) => (true, &mut self.children_done[owner], 0),
            None => (false, &mut self.done, since.done),
        };
        let at = list[from..].iter().rposition(|&other| other == id);
        list.remove(from + at.expect("it has been completed"));
        if is_child {
            let completed = &mut self.children_completed;
            let at = completed.iter().rposition(|&other| other == id);
            completed.remove(at.expect("it has been completed"));
        }
        let now = self.now;
        let request = &mut self.slab[id];
        request.error = 0;
        request.stamps.enter(Stage::Device, now);
    }

    /// Takes the completed requests of sources, for tests that act as their own worker. The room
    /// for completions stays, so that the next ones allocate nothing.
    #[cfg(feature = "testing")]
    pub fn take_done(&mut self) -> Vec<RequestId> {
        self.children_completed.clear();
        self.done.drain(..).collect()
    }

    /// Returns the tag that was handed out last, for tests that act as their own worker.
    #[cfg(feature = "testing")]
    pub fn newest_tag(&self) -> u16 {
        self.next_tag - 1
    }

    /// Returns a number that identifies the worker in probes; available at every probe.
    #[inline]
    pub(crate) fn number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Reads the clock for the transitions that follow.
    #[inline]
    pub fn tick(&mut self) -> u64 {
        if !cfg!(fathom_unstamped) {
            self.now = self.clock.now();
        }
        self.now
    }

    /// Moves the request to `stage` at the time of the last tick.
    #[inline]
    pub fn enter(&mut self, id: RequestId, stage: Stage) {
        let now = self.now;
        let number = self.number();
        let request = &mut self.slab[id];
        // `stage` is a constant wherever this function is inlined.
        match stage {
            Stage::Map => probe!(fathom, map, number, id.0),
            Stage::Device => {
                let (op, at, len) = (request.op as u8, request.at, request.len);
                probe!(fathom, submit, number, id.0, op, at, len);
            }
            _ => {}
        }
        request.stamps.enter(stage, now);
    }

    /// Completes the request at the time of the last tick; `errno` is 0 or positive.
    #[inline]
    pub fn complete(&mut self, id: RequestId, errno: i32) {
        let now = self.now;
        let number = self.number();
        let request = &mut self.slab[id];
        request.error = errno;
        probe!(fathom, done, number, id.0, errno);
        if let Some(owner) = request.owner.index() {
            self.children_completed.push(id);
            return self.children_done[owner].push(id);
        }
        request.stamps.enter(Stage::Finish, now);
        self.done.push(id);
    }

    /// Requests a call of [`Channel::timer`](crate::Channel::timer) once the clock has reached
    /// `ticks`. If an earlier time was requested already, `timer` is called then, and the channel
    /// asks again.
    #[inline]
    pub fn wake_at(&mut self, ticks: u64) {
        self.alarm = self.alarm.min(ticks);
    }

    /// Pops no new requests until the next [`Channel::timer`](crate::Channel::timer).
    #[inline]
    pub fn close(&mut self) {
        self.admits = false;
    }

    /// From now on, calls [`Channel::answered`](crate::Channel::answered) with each request that
    /// has been answered.
    pub fn watch_answers(&mut self) {
        self.watched = true;
    }

    /// Returns whether a filter may delay the request. A request of a source that is leaving must
    /// not be delayed, because the front-end does nothing else until the source is detached. A
    /// child may belong to such a source, so no child may be delayed then.
    #[inline]
    pub fn may_wait(&self, id: RequestId) -> bool {
        let request = &self.slab[id];
        let is_child = request.owner != Owner::SOURCE;
        self.leaving.is_empty() || !(is_child || self.leaving.contains(&request.source))
    }

    /// Returns how long to wait at most, beginning at `now`.
    pub(crate) fn until_alarm(&self, now: u64) -> Wait {
        match self.alarm {
            u64::MAX => Wait::Forever,
            alarm => Wait::For(self.clock.duration(alarm.saturating_sub(now))),
        }
    }

    /// Returns the time of the last tick.
    #[inline]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Returns the clock that all ticks refer to.
    #[inline]
    pub fn clock(&self) -> &'static Clock {
        self.clock
    }
}

/// A position in the sequence of completions (see [`Cx::mark`]); valid until the worker's turn
/// ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    done: usize,
    children: usize,
}

/// Completed requests, in no particular order.
#[derive(Debug)]
pub struct Completed {
    next: Mark,
    end: Mark,
}

impl Completed {
    /// Returns the next request. Not an iterator, because the caller uses `cx` in between.
    #[inline]
    pub fn next(&mut self, cx: &Cx) -> Option<RequestId> {
        if self.next.done < self.end.done {
            self.next.done += 1;
            return Some(cx.done[self.next.done - 1]);
        }
        if self.next.children < self.end.children {
            self.next.children += 1;
            return Some(cx.children_completed[self.next.children - 1]);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::PollEngine;

    #[test]
    fn channel_may_have_more_than_255_layers_with_children() {
        let mut cx = Cx::new(Box::new(PollEngine::default()));
        let owners: Vec<_> = (0..300).map(|_| cx.reserve_children(0).unwrap()).collect();
        assert!(owners.is_sorted_by(|below, above| below < above));
        assert_eq!(cx.newest_owner(), owners[299]);
        cx.slab.grow(1);
        let id = cx.slab.take().unwrap();
        cx.slab[id].owner = owners[299];
        cx.complete(id, 0);
        assert_eq!(cx.child_done(owners[299]), Some(id));
        // More layers than there are owner numbers are refused.
        let refused = (0..70_000).find_map(|_| cx.reserve_children(0).err());
        assert!(refused.unwrap().to_string().contains("too many layers"));
    }

    #[test]
    fn what_does_not_stand_is_in_flight_again() {
        let mut cx = Cx::new(Box::new(PollEngine::default()));
        let owner = cx.reserve_children(2).unwrap();
        cx.slab.grow(4);
        let ids: Vec<_> = (0..4).map(|_| cx.slab.take().unwrap()).collect();
        for (n, id) in ids.iter().enumerate() {
            cx.slab[*id].owner = if n % 2 == 0 { Owner::SOURCE } else { owner };
        }
        cx.complete(ids[0], 0);
        cx.complete(ids[1], 0);
        let mark = cx.mark();
        cx.complete(ids[2], libc::EIO);
        cx.complete(ids[3], 0);
        let mut back = Vec::new();
        cx.take_back(mark, |_, _| true, &mut back);
        assert!(back.is_empty());
        cx.take_back(mark, |_, _| false, &mut back);
        assert_eq!(back, [ids[2], ids[3]]);
        assert_eq!(cx.slab[ids[2]].error, 0);
        assert_eq!((cx.mark(), cx.done.clone()), (mark, vec![ids[0]]));
        assert_eq!(
            (cx.child_done(owner), cx.child_done(owner)),
            (Some(ids[1]), None)
        );
        cx.complete(ids[3], 0);
        assert_eq!(cx.child_done(owner), Some(ids[3]));
    }
}
