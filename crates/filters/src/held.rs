//! Requests that wait for their time.

use fathom_core::{Channel, Cx, RequestId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One worker's, the next one first. When the first one waits it makes room
/// for all that can be in flight, and then allocates no more.
#[derive(Default)]
pub(crate) struct Held {
    /// Due (in ticks), in which order they came, and which.
    heap: BinaryHeap<Reverse<(u64, u64, u32)>>,
    arrivals: u64,
}

impl Held {
    /// Keep the request until `due`.
    pub(crate) fn hold(&mut self, cx: &mut Cx, id: RequestId, due: u64) {
        self.arrivals += 1;
        self.heap.reserve(cx.slab.capacity() - self.heap.len());
        self.heap.push(Reverse((due, self.arrivals, id.0)));
        cx.wake_at(due);
    }

    /// Submit what is due, and ask to be woken for the next.
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

    /// Submit what may not wait any more, in the order of its time.
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
