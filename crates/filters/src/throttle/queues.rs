//! Requests of one worker that wait for capacity.

use fathom_core::{Channel, Cx, Op, RequestId};
use std::collections::VecDeque;

/// The queues of waiting requests, one per source and direction. Only the first request of each
/// queue holds a reservation. Therefore the queues of this worker and of others take turns, however
/// many requests wait in each.
#[derive(Default)]
pub(super) struct Queues {
    queues: Vec<Queue>,
    /// Queue at which the next round begins.
    first: usize,
    /// Number of waiting requests in all queues.
    waiting: usize,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<RequestId>,
    /// Tick at which the first waiting request may start.
    reserved: Option<u64>,
}

fn index(cx: &Cx, id: RequestId) -> usize {
    let request = &cx.slab[id];
    2 * usize::from(request.source) + usize::from(request.op != Op::Read)
}

impl Queues {
    /// Submits the request at the tick that `reserve` returns.
    pub(super) fn submit(
        &mut self,
        cx: &mut Cx,
        id: RequestId,
        below: &mut dyn Channel,
        reserve: impl FnOnce(&Cx, RequestId) -> u64,
    ) {
        let index = index(cx, id);
        if index >= self.queues.len() {
            self.queues.resize_with(index + 1, Queue::default);
        }
        let queue = &mut self.queues[index];
        if queue.waiting.is_empty() {
            let start = reserve(cx, id);
            if start <= cx.now() {
                return below.submit(cx, id);
            }
            queue.reserved = Some(start);
            cx.wake_at(start);
        }
        // Reserves space for all requests that can be in flight, to allocate only once.
        let room = cx.slab.capacity() - queue.waiting.len();
        queue.waiting.reserve(room);
        queue.waiting.push_back(id);
        self.waiting += 1;
    }

    /// Returns whether any request waits.
    pub(super) fn holds(&self) -> bool {
        self.waiting > 0
    }

    /// Submits the requests that are due, taking turns, and asks to be woken for the next one.
    pub(super) fn release_due(
        &mut self,
        cx: &mut Cx,
        below: &mut dyn Channel,
        reserve: impl Fn(&Cx, RequestId) -> u64,
    ) {
        let n = self.queues.len();
        loop {
            let mut any = false;
            for turn in 0..n {
                let queue = &mut self.queues[(self.first + turn) % n];
                if let Some(id) = queue.take_due(cx, &reserve) {
                    self.waiting -= 1;
                    below.submit(cx, id);
                    any = true;
                }
            }
            if !any {
                break;
            }
            self.first = (self.first + 1) % n;
        }
        let next = self.queues.iter().filter_map(|queue| queue.reserved).min();
        if let Some(next) = next {
            cx.wake_at(next);
        }
    }

    pub(super) fn forget_reservations(&mut self) {
        self.queues
            .iter_mut()
            .for_each(|queue| queue.reserved = None);
    }

    /// Submits the requests that must not wait any more.
    pub(super) fn release_leaving(
        &mut self,
        cx: &mut Cx,
        below: &mut dyn Channel,
        reserve: impl Fn(&Cx, RequestId) -> u64,
    ) {
        for queue in &mut self.queues {
            let first = queue.waiting.front().copied();
            let is_reserved = queue.reserved.is_some();
            let leaving: Vec<_> = (queue.waiting.iter().copied())
                .filter(|id| !cx.may_wait(*id))
                .collect();
            queue.waiting.retain(|id| !leaving.contains(id));
            self.waiting -= leaving.len();
            if queue.waiting.front().copied() != first {
                queue.reserved = None;
                // The next `release_due` makes a new reservation.
                if !queue.waiting.is_empty() {
                    cx.wake_at(cx.now());
                }
            }
            for id in leaving {
                if !(is_reserved && first == Some(id)) {
                    reserve(cx, id);
                }
                below.submit(cx, id);
            }
        }
    }
}

impl Queue {
    /// Takes the first request if it may start now. Otherwise, the request has a reservation
    /// afterwards.
    fn take_due(&mut self, cx: &Cx, reserve: impl Fn(&Cx, RequestId) -> u64) -> Option<RequestId> {
        let id = *self.waiting.front()?;
        let start = *self.reserved.get_or_insert_with(|| reserve(cx, id));
        if start > cx.now() {
            return None;
        }
        self.reserved = None;
        self.waiting.pop_front()
    }
}
