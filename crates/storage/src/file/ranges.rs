//! Who may write where, while parts of blocks are read, changed and written
//! back. Only disks whose blocks are larger than a sector need this.

use fathom_core::RequestId;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// A channel's number among those that share the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner(usize);

/// A lock on a range: held, or wanted.
#[derive(Debug)]
struct Lock {
    owner: Owner,
    id: RequestId,
    range: Range<u64>,
    /// It goes with no other. Whole-block writes go with each other (guests
    /// that race get either data) but not with those that write back what
    /// they have read.
    exclusive: bool,
    held: bool,
}

impl Lock {
    fn conflicts(&self, other: &Lock) -> bool {
        (self.exclusive || other.exclusive)
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

/// Where a channel learns that its requests' locks have come.
struct Mailbox {
    granted: Vec<RequestId>,
    event: Arc<OwnedFd>,
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
pub(super) struct Ranges(Mutex<Inner>);

impl Ranges {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Nothing in here panics half-way.
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A channel that will use the locks; the eventfd tells it of grants.
    pub(super) fn register(&self) -> io::Result<(Owner, Arc<OwnedFd>)> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let event = Arc::new(event);
        let mut inner = self.inner();
        inner.mailboxes.push(Mailbox {
            granted: Vec::new(),
            event: event.clone(),
        });
        Ok((Owner(inner.mailboxes.len() - 1), event))
    }

    /// Ask for a range. True: it is held now. False: it will be granted.
    pub(super) fn acquire(
        &self,
        owner: Owner,
        id: RequestId,
        range: Range<u64>,
        exclusive: bool,
    ) -> bool {
        let mut inner = self.inner();
        let mut lock = Lock {
            owner,
            id,
            range,
            exclusive,
            held: false,
        };
        lock.held = !inner.locks.iter().any(|earlier| earlier.conflicts(&lock));
        let held = lock.held;
        inner.waiting += usize::from(!held);
        inner.locks.push(lock);
        held
    }

    /// Give the request's range up and grant what waited for it. True when
    /// some of that is the owner's own.
    pub(super) fn release(&self, owner: Owner, id: RequestId) -> bool {
        let mut inner = self.inner();
        let mine = |lock: &Lock| lock.owner == owner && lock.id == id && lock.held;
        let index = inner.locks.iter().position(mine);
        inner.locks.remove(index.expect("released what is held"));
        if inner.waiting == 0 {
            return false;
        }
        inner.grant(owner)
    }

    /// Move the owner's grants to `granted`.
    pub(super) fn take_granted(&self, owner: Owner, granted: &mut Vec<RequestId>) {
        granted.append(&mut self.inner().mailboxes[owner.0].granted);
    }
}

impl Inner {
    fn grant(&mut self, releaser: Owner) -> bool {
        let mut own = false;
        for i in 0..self.locks.len() {
            let (earlier, rest) = self.locks.split_at_mut(i);
            let lock = &mut rest[0];
            if lock.held || earlier.iter().any(|e| e.conflicts(lock)) {
                continue;
            }
            lock.held = true;
            self.waiting -= 1;
            let mailbox = &mut self.mailboxes[lock.owner.0];
            mailbox.granted.push(lock.id);
            if lock.owner == releaser {
                own = true;
            } else {
                // An eventfd's counter cannot overflow by ones.
                let _ = rustix::io::write(&mailbox.event, &1u64.to_ne_bytes());
            }
        }
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: RequestId = RequestId(1);
    const B: RequestId = RequestId(2);
    const C: RequestId = RequestId(3);

    fn granted(ranges: &Ranges, owner: Owner) -> Vec<RequestId> {
        let mut granted = Vec::new();
        ranges.take_granted(owner, &mut granted);
        granted
    }

    #[test]
    fn whole_block_writes_go_together_and_parts_wait() {
        let ranges = Ranges::default();
        let (owner, _) = ranges.register().expect("eventfd");
        assert!(ranges.acquire(owner, A, 0..8192, false));
        assert!(ranges.acquire(owner, B, 4096..8192, false));
        assert!(!ranges.acquire(owner, C, 4096..8192, true));
        assert!(!ranges.release(owner, A));
        assert!(ranges.release(owner, B));
        assert_eq!(granted(&ranges, owner), [C]);
    }

    #[test]
    fn nobody_overtakes_a_conflict() {
        let ranges = Ranges::default();
        let (one, _) = ranges.register().expect("eventfd");
        let (two, event) = ranges.register().expect("eventfd");
        assert!(ranges.acquire(one, A, 0..4096, true));
        assert!(!ranges.acquire(two, A, 0..8192, true));
        // Would not conflict with what is held, but with what waits.
        assert!(!ranges.acquire(one, B, 4096..8192, false));
        assert!(ranges.acquire(one, C, 8192..12288, true));
        assert!(!ranges.release(one, A));
        assert_eq!(granted(&ranges, two), [A]);
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&*event, &mut count), Ok(8));
        assert!(ranges.release(one, C) || granted(&ranges, one).is_empty());
        assert!(!ranges.release(two, A));
        assert_eq!(granted(&ranges, one), [B]);
        assert!(!ranges.release(one, B));
        assert!(ranges.acquire(one, A, 0..u64::MAX, true));
    }
}
