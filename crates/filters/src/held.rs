//! Requests that are held back until a given time.

use fathom_core::{Channel, Cx, RequestId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Held requests of one worker, ordered by due time. The first hold reserves space for all requests
/// that can be in flight, so that later ones do not allocate.
#[derive(Default)]
pub(crate) struct Held {
    /// Due time (in ticks), order of arrival, and request.
    heap: BinaryHeap<Reverse<(u64, u64, u32)>>,
    arrivals: u64,
}

impl Held {
    /// Holds the request until `due`.
    pub(crate) fn hold(&mut self, cx: &mut Cx, id: RequestId, due: u64) {
        self.arrivals += 1;
        self.heap.reserve(cx.slab.capacity() - self.heap.len());
        self.heap.push(Reverse((due, self.arrivals, id.0)));
        cx.wake_at(due);
    }

    /// Submits the requests that are due, and asks to be woken for the next one.
    pub(crate) fn release_due(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        let now = cx.now();
        while let Some(Reverse((due, _, id))) = self.heap.peek().copied() {
            if due > now {
                return cx.wake_at(due);
            }
            self.heap.pop();
            below.submit(cx, RequestId(id));
        }
    }

    /// Submits the requests that must not wait any more, ordered by due time.
    pub(crate) fn release_leaving(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        let mut leaving = Vec::new();
        self.heap.retain(|Reverse((due, order, id))| {
            let stays = cx.may_wait(RequestId(*id));
            if !stays {
                leaving.push((*due, *order, *id));
            }
            stays
        });
        leaving.sort_unstable();
        for (_, _, id) in leaving {
            below.submit(cx, RequestId(id));
        }
    }
}
