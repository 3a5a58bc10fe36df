//! Puts events in order that are nearly so: a thread takes its time stamp before it gets its turn
//! to write.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fathom_run::Event;

/// Events that wait for older ones: about 8 MiB, and more than other threads can write while one
/// is being held up.
const WINDOW: usize = 1 << 16;

/// A window over a nearly ordered row of events.
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
    /// Those of one time stay as they came.
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
    /// Takes an event in; the oldest, when the window is full. An event that is older than one
    /// already given out is refused with the time by which it is late, in ns.
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

    /// The oldest that waits.
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
