//! Range locks, which protect read-modify-write of partial blocks.
//!
//! Changes of whole blocks, nearly all of them, are only noted in their own channel. A request that
//! changes a block partly asks every other channel of the disk for conflicting changes in flight.
//! From then on its lock keeps new conflicting changes waiting.

use fathom_core::{EventNotifier, RequestId};
use parking_lot::Mutex;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Index of a channel among those that share the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner(usize);

/// A range lock, held or waiting.
#[derive(Debug)]
struct Lock {
    owner: Owner,
    id: RequestId,
    range: Range<u64>,
    /// Whether the lock excludes all others: its owner writes back bytes that it has read. Changes
    /// of whole blocks do not exclude each other (guests that race get either data).
    exclusive: bool,
    held: bool,
    /// Number of channels that have not yet reported their changes in flight.
    asking: usize,
}

impl Lock {
    fn conflicts(&self, other: &Lock) -> bool {
        (self.exclusive || other.exclusive) && overlap(&self.range, &other.range)
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Messages from other channels to one channel.
struct Mailbox {
    /// Requests of this channel whose locks have been granted.
    granted: Vec<RequestId>,
    /// Exclusive locks whose owners ask for this channel's changes in flight.
    asked: Vec<(Owner, RequestId)>,
    /// Eventfd that wakes the channel. None: the channel has been dropped.
    notifier: Option<Arc<EventNotifier>>,
}

impl Mailbox {
    fn notify(&self) {
        if let Some(notifier) = &self.notifier {
            notifier.notify();
        }
    }
}

#[derive(Default)]
struct Inner {
    /// Locks in the order of their requests. No lock overtakes one that it conflicts with, so none
    /// starves.
    locks: Vec<Lock>,
    mailboxes: Vec<Mailbox>,
    waiting: usize,
}

/// The range locks of one disk.
#[derive(Default)]
pub(crate) struct Ranges {
    /// Number of exclusive locks, held and waiting. Changed only while `inner` is locked.
    exclusive: AtomicUsize,
    inner: Mutex<Inner>,
}

impl Ranges {
    /// Registers a channel of the disk.
    pub(crate) fn turns(self: &Arc<Self>) -> io::Result<Turns> {
        let notifier = Arc::new(EventNotifier::new()?);
        let mut inner = self.inner.lock();
        inner.mailboxes.push(Mailbox {
            granted: Vec::new(),
            asked: Vec::new(),
            notifier: Some(notifier.clone()),
        });
        Ok(Turns {
            ranges: self.clone(),
            owner: Owner(inner.mailboxes.len() - 1),
            notifier,
            unlisted: Vec::new(),
            granted: Vec::new(),
        })
    }
}

/// A channel's access to the range locks.
pub(crate) struct Turns {
    ranges: Arc<Ranges>,
    owner: Owner,
    notifier: Arc<EventNotifier>,
    /// Changes in flight that are not in the table of locks, by request.
    unlisted: Vec<Option<Range<u64>>>,
    granted: Vec<RequestId>,
}

impl Turns {
    /// Returns the eventfd that is signalled when [`Turns::look`] must be called.
    pub(crate) fn event(&self) -> RawFd {
        self.notifier.as_raw_fd()
    }

    /// Requests a lock on a range of whole blocks. Returns true if the lock is held now, false if
    /// it will be granted later. `exclusive`: the request changes only parts of the range.
    #[inline]
    pub(crate) fn acquire(&mut self, id: RequestId, range: Range<u64>, exclusive: bool) -> bool {
        // If another channel has just added an exclusive lock that this load does not see, that
        // lock waits until this channel calls `look`, which then reports the change noted here.
        if !exclusive && self.ranges.exclusive.load(Ordering::Relaxed) == 0 {
            self.note(id, range);
            return true;
        }
        self.acquire_listed(id, range, exclusive)
    }

    #[inline]
    fn note(&mut self, id: RequestId, range: Range<u64>) {
        let index = id.0 as usize;
        if index >= self.unlisted.len() {
            self.unlisted.resize(index + 1, None);
        }
        self.unlisted[index] = Some(range);
    }

    #[cold]
    fn acquire_listed(&mut self, id: RequestId, range: Range<u64>, exclusive: bool) -> bool {
        let ranges = self.ranges.clone();
        let mut inner = ranges.inner.lock();
        let mut lock = Lock {
            owner: self.owner,
            id,
            range,
            exclusive,
            held: false,
            asking: 0,
        };
        if exclusive {
            ranges.exclusive.fetch_add(1, Ordering::Relaxed);
            self.list(&mut inner, &lock.range);
            lock.asking = inner.ask_others(self.owner, id);
        }
        lock.held = lock.asking == 0 && !inner.locks.iter().any(|l| l.conflicts(&lock));
        let held = lock.held;
        if held && !exclusive {
            self.note(id, lock.range);
            return true;
        }
        inner.waiting += usize::from(!held);
        inner.locks.push(lock);
        held
    }

    /// Moves the changes in flight that overlap the range into the table of locks.
    fn list(&mut self, inner: &mut Inner, range: &Range<u64>) {
        for (index, entry) in self.unlisted.iter_mut().enumerate() {
            if let Some(range) = entry.take_if(|noted| overlap(noted, range)) {
                // In front, so that they come before the locks that wait for them.
                let lock = Lock {
                    owner: self.owner,
                    id: RequestId(index as u32),
                    range,
                    exclusive: false,
                    held: true,
                    asking: 0,
                };
                inner.locks.insert(0, lock);
            }
        }
    }

    /// Releases the lock of a completed change, and grants locks that waited for it.
    #[inline]
    pub(crate) fn release(&mut self, id: RequestId) {
        let noted = self.unlisted.get_mut(id.0 as usize);
        if noted.and_then(Option::take).is_none() {
            self.release_listed(id);
        }
    }

    #[cold]
    fn release_listed(&mut self, id: RequestId) {
        let mut inner = self.ranges.inner.lock();
        let mine = |lock: &Lock| lock.owner == self.owner && lock.id == id && lock.held;
        let Some(index) = inner.locks.iter().position(mine) else {
            return; // a request that needed no lock
        };
        if inner.locks.remove(index).exclusive {
            self.ranges.exclusive.fetch_sub(1, Ordering::Relaxed);
        }
        inner.grant(self.owner);
        self.granted
            .append(&mut inner.mailboxes[self.owner.0].granted);
    }

    /// Handles a signal of the event: reports changes in flight to channels that asked, and
    /// collects locks that have been granted.
    pub(crate) fn look(&mut self) {
        let ranges = self.ranges.clone();
        self.look_at(&mut ranges.inner.lock());
    }

    fn look_at(&mut self, inner: &mut Inner) {
        for (owner, id) in std::mem::take(&mut inner.mailboxes[self.owner.0].asked) {
            if let Some(range) = inner.answered(owner, id) {
                self.list(inner, &range);
            }
        }
        inner.grant(self.owner);
        self.granted
            .append(&mut inner.mailboxes[self.owner.0].granted);
    }

    /// Returns a request whose lock has been granted.
    #[inline]
    pub(crate) fn next_granted(&mut self) -> Option<RequestId> {
        self.granted.pop()
    }
}

impl Drop for Turns {
    /// Answers pending questions: nothing is in flight in this channel any more.
    fn drop(&mut self) {
        self.unlisted.clear();
        let ranges = self.ranges.clone();
        // Both steps are under one lock: a question that another channel asks in between would get
        // no answer.
        let mut inner = ranges.inner.lock();
        self.look_at(&mut inner);
        inner.mailboxes[self.owner.0].notifier = None;
    }
}

impl Inner {
    /// Asks the other channels for their changes in flight; returns the number of channels asked.
    fn ask_others(&mut self, owner: Owner, id: RequestId) -> usize {
        let mut asked = 0;
        for (index, mailbox) in self.mailboxes.iter_mut().enumerate() {
            if index != owner.0 && mailbox.notifier.is_some() {
                mailbox.asked.push((owner, id));
                mailbox.notify();
                asked += 1;
            }
        }
        asked
    }

    /// Counts one channel's report to a lock, and returns the lock's range if it waits for reports.
    fn answered(&mut self, owner: Owner, id: RequestId) -> Option<Range<u64>> {
        let asks = |lock: &&mut Lock| lock.owner == owner && lock.id == id && lock.asking > 0;
        let lock = self.locks.iter_mut().find(asks)?;
        lock.asking -= 1;
        Some(lock.range.clone())
    }

    /// Grants locks that no earlier lock conflicts with, and wakes their owners, except for the
    /// caller.
    fn grant(&mut self, caller: Owner) {
        if self.waiting == 0 {
            return;
        }
        for i in 0..self.locks.len() {
            let (earlier, rest) = self.locks.split_at_mut(i);
            let lock = &mut rest[0];
            if lock.held || lock.asking > 0 || earlier.iter().any(|e| e.conflicts(lock)) {
                continue;
            }
            lock.held = true;
            self.waiting -= 1;
            let mailbox = &mut self.mailboxes[lock.owner.0];
            mailbox.granted.push(lock.id);
            if lock.owner != caller {
                mailbox.notify();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A channel that asks while another one is dropped never waits for the dropped one.
    #[test]
    fn nobody_waits_for_a_channel_that_is_dropped_meanwhile() {
        let ranges = Arc::new(Ranges::default());
        for _ in 0..200 {
            let mut asking = ranges.turns().unwrap();
            let dropped = ranges.turns().unwrap();
            let dropping = std::thread::spawn(move || drop(dropped));
            let mut is_held = asking.acquire(A, 0..512, true);
            dropping.join().unwrap();
            asking.look();
            while let Some(id) = asking.next_granted() {
                is_held |= id == A;
            }
            assert!(is_held);
            asking.release(A);
        }
    }

    const A: RequestId = RequestId(1);
    const B: RequestId = RequestId(2);
    const C: RequestId = RequestId(3);

    fn granted(turns: &mut Turns) -> Vec<RequestId> {
        std::iter::from_fn(|| turns.next_granted()).collect()
    }

    fn rung(turns: &Turns) -> bool {
        turns.notifier.clear()
    }

    #[test]
    fn whole_blocks_go_together_and_parts_wait() {
        let mut turns = Arc::new(Ranges::default()).turns().expect("eventfd");
        assert!(turns.acquire(A, 0..8192, false));
        assert!(turns.acquire(B, 4096..8192, false));
        assert!(!turns.acquire(C, 4096..8192, true));
        turns.release(A);
        assert_eq!(granted(&mut turns), []);
        turns.release(B);
        assert_eq!(granted(&mut turns), [C]);
        assert!(!turns.acquire(A, 4096..8192, false));
        assert!(turns.acquire(B, 8192..16384, false));
        turns.release(C);
        assert_eq!(granted(&mut turns), [A]);
        for id in [A, B] {
            turns.release(id);
        }
        assert!(turns.ranges.inner.lock().locks.is_empty());
    }

    #[test]
    fn another_channel_is_asked_what_it_has_in_flight() {
        let ranges = Arc::new(Ranges::default());
        let (mut one, mut two) = (ranges.turns().unwrap(), ranges.turns().unwrap());
        assert!(two.acquire(A, 0..4096, false));
        assert!(two.acquire(B, 4096..8192, false));
        assert!(!one.acquire(A, 0..512, true));
        assert!(rung(&two));
        // This request comes after the question and before the answer.
        assert!(!two.acquire(C, 0..4096, false));
        two.look();
        assert!(!rung(&one), "A of the other is in flight");
        two.release(A);
        assert!(rung(&one));
        one.look();
        assert_eq!(granted(&mut one), [A]);
        one.release(A);
        assert!(rung(&two));
        two.look();
        assert_eq!(granted(&mut two), [C]);
    }

    #[test]
    fn nobody_overtakes_a_conflict() {
        let ranges = Arc::new(Ranges::default());
        let (mut one, mut two) = (ranges.turns().unwrap(), ranges.turns().unwrap());
        assert!(!one.acquire(A, 0..4096, true));
        two.look();
        one.look();
        assert_eq!(granted(&mut one), [A]);
        assert!(!two.acquire(A, 0..8192, true));
        // Conflicts with a waiting lock, though not with the lock that is held.
        assert!(!one.acquire(B, 4096..8192, false));
        assert!(one.acquire(C, 8192..12288, false));
        one.look();
        one.release(A);
        one.release(C);
        assert_eq!(granted(&mut one), []);
        two.look();
        assert_eq!(granted(&mut two), [A]);
        two.release(A);
        one.look();
        assert_eq!(granted(&mut one), [B]);
    }

    #[test]
    fn who_is_gone_is_not_waited_for() {
        let ranges = Arc::new(Ranges::default());
        let (mut one, two) = (ranges.turns().unwrap(), ranges.turns().unwrap());
        assert!(!one.acquire(A, 0..4096, true));
        drop(two);
        one.look();
        assert_eq!(granted(&mut one), [A]);
        assert!(one.acquire(B, 4096..8192, true));
    }
}
