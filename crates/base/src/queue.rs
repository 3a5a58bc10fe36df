//! Selects the next stripe to fetch.
//!
//! The order is: stripes for which users wait, read-ahead, the boot profile, and the rest of the
//! image from its start.

use fathom_storage::cached::wire::Run;
use std::collections::{HashMap, HashSet, VecDeque};

/// The reasons to fetch a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Wanted,
    /// Read-ahead after a wanted stripe.
    Ahead,
    /// Prefetching without any request.
    Early,
}

/// The stripes that may be prefetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Early {
    Nothing,
    /// The stripes of the boot profile.
    Profile,
    All,
}

/// Initial and maximum number of bytes to read ahead.
const AHEAD: (u64, u64) = (1 << 20, 16 << 20);

/// A sequential reader.
struct Stream {
    /// Stripe after the last one that was queued for the reader.
    end: u32,
    /// Number of stripes to read ahead.
    count: u32,
}

/// Maximum number of readers that are tracked.
const STREAMS: usize = 16;

pub struct Queue {
    stripes: u32,
    wanted: VecDeque<u32>,
    ahead: VecDeque<u32>,
    profile: VecDeque<u32>,
    /// First stripe that has not yet been prefetched as a part of the rest of the image.
    rest: u32,
    /// Stripes in flight, and the reason to fetch each of them.
    flying: HashMap<u32, Why>,
    /// Set of the stripes in `wanted`.
    waiting: HashSet<u32>,
    streams: VecDeque<Stream>,
    ahead_counts: (u32, u32),
}

impl Queue {
    /// Creates a queue. `stripe` is the stripe size, and `most` limits the read-ahead; both are in
    /// bytes.
    pub fn new(stripes: u32, stripe: u64, most: u64) -> Queue {
        let count = |bytes: u64| (bytes.min(most) / stripe).clamp(1, 256) as u32;
        Queue {
            stripes,
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            profile: VecDeque::new(),
            rest: 0,
            flying: HashMap::new(),
            waiting: HashSet::new(),
            streams: VecDeque::new(),
            ahead_counts: (count(AHEAD.0), count(AHEAD.1)),
        }
    }

    /// Queues a range for which a user waits. `has` returns whether a stripe is in the cache.
    pub fn want(&mut self, (first, count): Run, has: impl Fn(u32) -> bool) {
        let mut is_new = false;
        for stripe in first..first + count {
            match self.flying.get_mut(&stripe) {
                Some(why) => {
                    is_new |= *why != Why::Wanted;
                    *why = Why::Wanted;
                }
                None if !has(stripe) && self.waiting.insert(stripe) => {
                    is_new = true;
                    self.wanted.push_back(stripe);
                }
                None => {}
            }
        }
        // A repeated request does not advance a reader.
        if is_new {
            self.look_ahead(first, first + count);
        }
    }

    /// Queues read-ahead after the range from `from` to `to`.
    fn look_ahead(&mut self, from: u32, to: u32) {
        let (least, most) = self.ahead_counts;
        let known = self
            .streams
            .iter()
            .position(|stream| (from..=to).contains(&stream.end));
        let mut stream = match known.and_then(|known| self.streams.remove(known)) {
            // The reader continues sequentially, so its read-ahead doubles.
            Some(stream) => Stream {
                end: to,
                count: (2 * stream.count).min(most),
            },
            None => Stream {
                end: to,
                count: least,
            },
        };
        stream.end = to.saturating_add(stream.count).min(self.stripes);
        // Discards the oldest read-ahead, whose readers have probably moved on.
        self.ahead.truncate(most as usize);
        (to..stream.end)
            .rev()
            .for_each(|stripe| self.ahead.push_front(stripe));
        self.streams.push_front(stream);
        self.streams.truncate(STREAMS);
    }

    /// Returns the next stripe to fetch and marks it as in flight.
    ///
    /// `has` returns whether a stripe is in the cache, and `waits` whether a user still waits for
    /// it.
    pub fn next(
        &mut self,
        early: Early,
        has: impl Fn(u32) -> bool,
        waits: impl Fn(u32) -> bool,
    ) -> Option<(u32, Why)> {
        let is_out = |flying: &HashMap<u32, Why>, stripe: &u32| {
            !has(*stripe) && !flying.contains_key(stripe)
        };
        while let Some(stripe) = self.wanted.pop_front() {
            self.waiting.remove(&stripe);
            if waits(stripe) && is_out(&self.flying, &stripe) {
                return Some(self.fly(stripe, Why::Wanted));
            }
        }
        while let Some(stripe) = self.ahead.pop_front() {
            if is_out(&self.flying, &stripe) {
                return Some(self.fly(stripe, Why::Ahead));
            }
        }
        while early >= Early::Profile
            && let Some(stripe) = self.profile.pop_front()
        {
            if is_out(&self.flying, &stripe) {
                return Some(self.fly(stripe, Why::Early));
            }
        }
        while early == Early::All && self.rest < self.stripes {
            let stripe = self.rest;
            self.rest += 1;
            if is_out(&self.flying, &stripe) {
                return Some(self.fly(stripe, Why::Early));
            }
        }
        None
    }

    /// Prefetches the boot profile from its beginning, because a boot has started.
    pub fn begin(&mut self, profile: &[u32]) {
        let stripes = self.stripes;
        self.profile = profile
            .iter()
            .copied()
            .filter(|&stripe| stripe < stripes)
            .collect();
    }

    fn fly(&mut self, stripe: u32, why: Why) -> (u32, Why) {
        self.flying.insert(stripe, why);
        (stripe, why)
    }

    pub fn in_flight(&self) -> usize {
        self.flying.len()
    }

    /// Removes a stripe that is no longer in flight, whether it was fetched or not.
    pub fn landed(&mut self, stripe: u32) {
        self.flying.remove(&stripe);
    }

    /// Removes a stripe that could not be fetched. Queues it again, last, if a user waits for it.
    pub fn failed(&mut self, stripe: u32) {
        if self.flying.remove(&stripe) == Some(Why::Wanted) && self.waiting.insert(stripe) {
            self.wanted.push_back(stripe);
        }
    }

    /// Queues a stripe again, first, because no attempt was made to fetch it.
    pub fn put_back(&mut self, stripe: u32) {
        match self.flying.remove(&stripe) {
            Some(Why::Wanted) if self.waiting.insert(stripe) => self.wanted.push_front(stripe),
            Some(Why::Ahead) => self.ahead.push_front(stripe),
            Some(Why::Early) => self.profile.push_front(stripe),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: fn(u32) -> bool = |_| false;

    fn all(queue: &mut Queue, early: Early, has: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut order = Vec::new();
        while let Some((stripe, _)) = queue.next(early, &has, |_| true) {
            order.push(stripe);
        }
        order
    }

    #[test]
    fn what_is_waited_for_comes_first_and_all_come_once() {
        let mut queue = Queue::new(12, 1 << 20, 1 << 30);
        queue.begin(&[7, 2, 99, 5]);
        queue.want((5, 1), NONE);
        queue.want((5, 1), NONE);
        let has = |stripe| stripe == 9;
        assert_eq!(all(&mut queue, Early::Nothing, has), [5, 6]);
        assert_eq!(
            all(&mut queue, Early::All, has),
            [7, 2, 0, 1, 3, 4, 8, 10, 11]
        );
        assert_eq!(queue.in_flight(), 11);
        // Stripes in flight are not fetched again.
        queue.want((0, 12), NONE);
        assert_eq!(
            queue.next(Early::All, NONE, |_| true),
            Some((9, Why::Wanted))
        );
        assert_eq!(queue.next(Early::All, NONE, |_| true), None);
    }

    #[test]
    fn who_goes_on_is_read_ahead_of_further() {
        let mut queue = Queue::new(1000, 1 << 18, 1 << 30);
        queue.want((10, 1), NONE);
        assert_eq!(all(&mut queue, Early::Nothing, NONE), [10, 11, 12, 13, 14]);
        queue.want((500, 1), |_| false);
        assert_eq!(all(&mut queue, Early::Nothing, NONE).len(), 5);
        let has = |stripe| stripe < 15;
        queue.want((15, 1), has);
        assert_eq!(
            all(&mut queue, Early::Nothing, has),
            (15..24).collect::<Vec<_>>()
        );
    }

    #[test]
    fn what_has_failed_comes_again() {
        let mut queue = Queue::new(10, 1 << 20, 1 << 30);
        queue.want((3, 1), NONE);
        assert_eq!(
            queue.next(Early::Nothing, NONE, |_| true),
            Some((3, Why::Wanted))
        );
        queue.failed(3);
        assert_eq!(
            queue.next(Early::Nothing, NONE, |_| true),
            Some((3, Why::Wanted))
        );
        queue.landed(3);
        assert_eq!(all(&mut queue, Early::Nothing, |stripe| stripe == 3), [4]);
        queue.failed(4);
        assert_eq!(queue.next(Early::Nothing, NONE, |_| true), None);
        // The rest of the image contains the stripe.
        assert!(all(&mut queue, Early::All, NONE).contains(&4));
    }

    #[test]
    fn a_stripe_on_its_way_becomes_urgent() {
        let mut queue = Queue::new(10, 1 << 20, 1 << 30);
        queue.begin(&[8]);
        assert_eq!(
            queue.next(Early::All, NONE, |_| true),
            Some((8, Why::Early))
        );
        queue.want((8, 1), NONE);
        queue.failed(8);
        assert_eq!(
            queue.next(Early::Nothing, NONE, |_| true),
            Some((8, Why::Wanted))
        );
    }
}
