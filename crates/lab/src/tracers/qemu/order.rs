//! Sorts nearly ordered events: a thread takes its timestamp before it gets its turn to write.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fathom_run::Event;

/// Number of events that wait for older ones. The waiting events need about 8 MiB. Other threads
/// write fewer events than these while one thread is delayed.
const WINDOW: usize = 1 << 16;

/// A sorting window over a nearly ordered sequence of events.
#[derive(Debug, Default)]
pub(super) struct Order {
    waiting: BinaryHeap<Reverse<Waiting>>,
    pushed: u64,
    last: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    event: Event,
}

impl Waiting {
    /// Sort key: events of the same time keep their order of arrival.
    fn key(&self) -> (u64, u64) {
        (self.event.time, self.number)
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Waiting) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Waiting) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Waiting) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl Order {
    /// Adds an event. If the window is full, returns the oldest event. An event that is older than
    /// one already returned is rejected with its lateness in nanoseconds.
    pub fn push(&mut self, event: Event) -> Result<Option<Event>, u64> {
        if event.time < self.last {
            return Err(self.last - event.time);
        }
        let number = self.pushed;
        self.pushed += 1;
        self.waiting.push(Reverse(Waiting { number, event }));
        if self.waiting.len() <= WINDOW {
            return Ok(None);
        }
        Ok(self.pop())
    }

    /// Removes and returns the oldest waiting event.
    pub fn pop(&mut self) -> Option<Event> {
        let Reverse(Waiting { event, .. }) = self.waiting.pop()?;
        self.last = event.time;
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::Kind;

    fn event(time: u64, number: u64) -> Event {
        Event::new(time, Kind::Qemu, 0, 0, &[number])
    }

    #[test]
    fn near_order_becomes_order_and_equals_keep_theirs() {
        let mut order = Order::default();
        let mut out = Vec::new();
        for number in 0..3 * WINDOW as u64 {
            let time = (number / 4) ^ 5;
            out.extend(order.push(event(time, number)).unwrap());
        }
        out.extend(std::iter::from_fn(|| order.pop()));
        assert_eq!(out.len(), 3 * WINDOW);
        assert!(out.is_sorted_by_key(|e| (e.time, e.args[0])));
    }

    #[test]
    fn what_is_too_late_is_refused() {
        let mut order = Order::default();
        for number in 0..=WINDOW as u64 {
            order.push(event(1000 + number, number)).unwrap();
        }
        assert_eq!(order.push(event(10, 0)), Err(990));
    }
}
