//! Who may change what, while parts of blocks are read, changed and written
//! back.
//!
//! Changes of whole blocks, which are nearly all, only leave a note in their
//! own channel. Who wants to change a part of a block asks every channel of
//! the disk for those that are in its way, and from then on keeps others out.

use fathom_core::RequestId;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A channel's number among those that share the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner(usize);

/// A lock on a range: held, or wanted.
#[derive(Debug)]
struct Lock {
    owner: Owner,
    id: RequestId,
    range: Range<u64>,
    /// It goes with no other: it writes back what it has read. Changes of
    /// whole blocks go with each other (guests that race get either data).
    exclusive: bool,
    held: bool,
    /// Channels that have not told yet what they have in flight.
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

/// What others want of a channel.
struct Mailbox {
    /// Its requests whose locks have come.
    granted: Vec<RequestId>,
    /// Exclusive locks that want to know what it has in flight.
    asked: Vec<(Owner, RequestId)>,
    /// None: the channel is gone.
    event: Option<Arc<OwnedFd>>,
}

impl Mailbox {
    fn ring(&self) {
        if let Some(event) = &self.event {
            // An eventfd's counter cannot overflow by ones.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }
}

#[derive(Default)]
struct Inner {
    /// In the order in which they were asked for; nobody overtakes whom it
    /// conflicts with, so nobody starves.
    locks: Vec<Lock>,
    mailboxes: Vec<Mailbox>,
    waiting: usize,
}

/// The range locks of one disk.
#[derive(Default)]
pub(crate) struct Ranges {
    /// Exclusive locks, held and wanted. Changed with `inner` locked only.
    exclusive: AtomicUsize,
    inner: Mutex<Inner>,
}

impl Ranges {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Nothing in here panics half-way.
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// For a channel of the disk.
    pub(crate) fn turns(self: &Arc<Self>) -> io::Result<Turns> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let event = Arc::new(event);
        let mut inner = self.inner();
        inner.mailboxes.push(Mailbox {
            granted: Vec::new(),
            asked: Vec::new(),
            event: Some(event.clone()),
        });
        Ok(Turns {
            ranges: self.clone(),
            owner: Owner(inner.mailboxes.len() - 1),
            event,
            unlisted: Vec::new(),
            granted: Vec::new(),
        })
    }
}

/// One channel's part in the range locks: whose turn it is.
pub(crate) struct Turns {
    ranges: Arc<Ranges>,
    owner: Owner,
    event: Arc<OwnedFd>,
    /// Changes in flight of which the table of locks does not know, by
    /// request.
    unlisted: Vec<Option<Range<u64>>>,
    granted: Vec<RequestId>,
}

impl Turns {
    /// Signalled when there is something to [`Turns::look`] at.
    pub(crate) fn event(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Ask for a range of whole blocks. True: it is held now. False: it will
    /// be granted. `exclusive`: only parts of it change.
    #[inline]
    pub(crate) fn acquire(&mut self, id: RequestId, range: Range<u64>, exclusive: bool) -> bool {
        // Another channel's exclusive lock that is not seen here yet waits
        // for this channel to look, and then sees what is noted now.
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
        let mut inner = ranges.inner();
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

    /// Enter the changes in flight that overlap the range into the table.
    fn list(&mut self, inner: &mut Inner, range: &Range<u64>) {
        for (index, entry) in self.unlisted.iter_mut().enumerate() {
            if let Some(range) = entry.take_if(|noted| overlap(noted, range)) {
                // Before whoever waits for them.
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

    /// The change is over: give its range up and grant what waited for it.
    #[inline]
    pub(crate) fn release(&mut self, id: RequestId) {
        let noted = self.unlisted.get_mut(id.0 as usize);
        if noted.and_then(Option::take).is_none() {
            self.release_listed(id);
        }
    }

    #[cold]
    fn release_listed(&mut self, id: RequestId) {
        let mut inner = self.ranges.inner();
        let mine = |lock: &Lock| lock.owner == self.owner && lock.id == id && lock.held;
        let Some(index) = inner.locks.iter().position(mine) else {
            return; // it needed no lock
        };
        if inner.locks.remove(index).exclusive {
            self.ranges.exclusive.fetch_sub(1, Ordering::Relaxed);
        }
        inner.grant(self.owner);
        self.granted
            .append(&mut inner.mailboxes[self.owner.0].granted);
    }

    /// The event was signalled: tell who asks what is in flight, and hear
    /// what has been granted.
    pub(crate) fn look(&mut self) {
        let ranges = self.ranges.clone();
        let mut inner = ranges.inner();
        for (owner, id) in std::mem::take(&mut inner.mailboxes[self.owner.0].asked) {
            if let Some(range) = inner.answered(owner, id) {
                self.list(&mut inner, &range);
            }
        }
        inner.grant(self.owner);
        self.granted
            .append(&mut inner.mailboxes[self.owner.0].granted);
    }

    /// A request whose turn has come.
    #[inline]
    pub(crate) fn next_granted(&mut self) -> Option<RequestId> {
        self.granted.pop()
    }
}

impl Drop for Turns {
    /// Nothing is in flight: nobody need wait for an answer.
    fn drop(&mut self) {
        self.unlisted.clear();
        self.look();
        self.ranges.inner().mailboxes[self.owner.0].event = None;
    }
}

impl Inner {
    /// Ask the other channels what they have in flight; how many were asked.
    fn ask_others(&mut self, owner: Owner, id: RequestId) -> usize {
        let mut asked = 0;
        for (index, mailbox) in self.mailboxes.iter_mut().enumerate() {
            if index != owner.0 && mailbox.event.is_some() {
                mailbox.asked.push((owner, id));
                mailbox.ring();
                asked += 1;
            }
        }
        asked
    }

    /// One more channel tells that lock what it has in flight: of which range?
    fn answered(&mut self, owner: Owner, id: RequestId) -> Option<Range<u64>> {
        let asks = |lock: &&mut Lock| lock.owner == owner && lock.id == id && lock.asking > 0;
        let lock = self.locks.iter_mut().find(asks)?;
        lock.asking -= 1;
        Some(lock.range.clone())
    }

    /// Grant what nothing is in the way of, and tell its owners, but for the
    /// one that calls.
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
                mailbox.ring();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: RequestId = RequestId(1);
    const B: RequestId = RequestId(2);
    const C: RequestId = RequestId(3);

    fn granted(turns: &mut Turns) -> Vec<RequestId> {
        std::iter::from_fn(|| turns.next_granted()).collect()
    }

    fn rung(turns: &Turns) -> bool {
        rustix::io::read(&*turns.event, &mut [0; 8]).is_ok()
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
        assert!(turns.ranges.inner().locks.is_empty());
    }

    #[test]
    fn another_channel_is_asked_what_it_has_in_flight() {
        let ranges = Arc::new(Ranges::default());
        let (mut one, mut two) = (ranges.turns().unwrap(), ranges.turns().unwrap());
        assert!(two.acquire(A, 0..4096, false));
        assert!(two.acquire(B, 4096..8192, false));
        assert!(!one.acquire(A, 0..512, true));
        assert!(rung(&two));
        // It comes before the answer, but after the question.
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
        // Would not conflict with what is held, but with what waits.
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
