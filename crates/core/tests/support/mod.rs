//! A source whose peer is the test.

use fathom_core::{Broken, Cx, Eventfd, Op, Request, RequestId, Source};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::any::Any;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

/// The peer of a [`TestSource`], in the role of a guest.
pub struct Peer {
    kick: Mutex<OwnedFd>,
    wants_kicks: AtomicBool,
    broken: AtomicBool,
    echoes: AtomicU64,
    offered: AtomicU64,
    popped: AtomicU64,
    /// Number of times that the worker has checked for requests.
    looks: AtomicU64,
    visible: AtomicU64,
    published: AtomicU64,
    notified: AtomicU64,
    /// A notification lasts until this is false.
    slow: AtomicBool,
    /// Requests write zeroes to the first block.
    zeroes: AtomicBool,
}

impl Peer {
    pub fn new() -> Arc<Peer> {
        Arc::new(Peer {
            kick: Mutex::new(new_eventfd()),
            wants_kicks: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            echoes: AtomicU64::new(0),
            offered: AtomicU64::new(0),
            popped: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            visible: AtomicU64::new(0),
            published: AtomicU64::new(0),
            notified: AtomicU64::new(0),
            slow: AtomicBool::new(false),
            zeroes: AtomicBool::new(false),
        })
    }

    /// Makes requests available, and kicks if the source has asked for kicks.
    pub fn offer(&self, n: u64) {
        self.offered.fetch_add(n, SeqCst);
        if self.wants_kicks.load(SeqCst) {
            signal(&self.kick.lock());
        }
    }

    /// Uses a new eventfd for kicks from now on. Returns a copy for the source.
    pub fn replace_kick(&self) -> OwnedFd {
        let kick = new_eventfd();
        let copy = kick.try_clone().unwrap();
        *self.kick.lock() = kick;
        copy
    }

    /// Offers a request each time that replies are published, `n` times. Simulates a guest that is
    /// faster than the worker's next check.
    pub fn echo(&self, n: u64) {
        self.echoes.store(n, SeqCst);
    }

    pub fn break_protocol(&self) {
        self.broken.store(true, SeqCst);
    }

    /// Sets whether notifications last until `slow` is cleared.
    pub fn be_slow(&self, slow: bool) {
        self.slow.store(slow, SeqCst);
    }

    /// Makes the requests write zeroes to the first block.
    pub fn write_zeroes(&self) {
        self.zeroes.store(true, SeqCst);
    }

    pub fn popped(&self) -> u64 {
        self.popped.load(SeqCst)
    }

    pub fn looks(&self) -> u64 {
        self.looks.load(SeqCst)
    }

    pub fn answered(&self) -> u64 {
        self.visible.load(SeqCst)
    }

    pub fn published(&self) -> u64 {
        self.published.load(SeqCst)
    }

    pub fn notified(&self) -> u64 {
        self.notified.load(SeqCst)
    }
}

pub struct TestSource {
    peer: Arc<Peer>,
    kick: OwnedFd,
    capacity: usize,
    /// Number of the first requests that count as inherited.
    inherited: u64,
    finished: u64,
}

impl TestSource {
    pub fn boxed(peer: &Arc<Peer>, capacity: usize) -> Box<dyn Source> {
        TestSource::with_inherited(peer, capacity, 0)
    }

    /// Creates a source whose first `inherited` requests were popped by a server that was killed.
    pub fn with_inherited(peer: &Arc<Peer>, capacity: usize, inherited: u64) -> Box<dyn Source> {
        Box::new(TestSource {
            peer: peer.clone(),
            kick: peer.kick.lock().try_clone().unwrap(),
            capacity,
            inherited,
            finished: 0,
        })
    }
}

impl Source for TestSource {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn kick_fd(&self) -> Option<RawFd> {
        Some(self.kick.as_raw_fd())
    }

    fn set_eventfd(&mut self, which: Eventfd, fd: Option<OwnedFd>) -> Option<OwnedFd> {
        assert_eq!(which, Eventfd::Kick);
        fd.map(|fd| std::mem::replace(&mut self.kick, fd))
    }

    fn inherited(&self) -> usize {
        let popped = self.peer.popped.load(SeqCst);
        self.inherited.saturating_sub(popped) as usize
    }

    fn pending(&mut self) -> bool {
        self.peer.looks.fetch_add(1, SeqCst);
        self.peer.offered.load(SeqCst) > self.peer.popped.load(SeqCst)
    }

    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        if self.peer.broken.load(SeqCst) {
            // Answers a malformed request before the one that breaks the protocol.
            self.finished += 1;
            cx.refused += 1;
            return Err(Broken("the test broke it".into()));
        }
        self.peer.looks.fetch_add(1, SeqCst);
        let available = self.peer.offered.load(SeqCst) - self.peer.popped.load(SeqCst);
        for _ in 0..available.min(room as u64) {
            let id = cx.slab.take().expect("room was promised");
            let request = &mut cx.slab[id];
            request.op = Op::Read;
            if self.peer.zeroes.load(SeqCst) {
                request.op = Op::WriteZeroes;
                (request.offset, request.len) = (0, 4096);
            }
            batch.push(id);
            self.peer.popped.fetch_add(1, SeqCst);
        }
        Ok(0)
    }

    fn finish(&mut self, _request: &Request) {
        self.finished += 1;
    }

    fn publish(&mut self, _: &mut Cx) -> bool {
        self.peer.visible.store(self.finished, SeqCst);
        self.peer.published.fetch_add(1, SeqCst);
        let echoes = self.peer.echoes.load(SeqCst);
        if echoes > 0 {
            self.peer.echo(echoes - 1);
            self.peer.offer(1);
        }
        true
    }

    fn notify(&mut self) {
        while self.peer.slow.load(SeqCst) {
            std::thread::yield_now();
        }
        self.peer.notified.fetch_add(1, SeqCst);
    }

    fn arm(&mut self) -> bool {
        self.peer.wants_kicks.store(true, SeqCst);
        self.pending()
    }

    fn disarm(&mut self) {
        self.peer.wants_kicks.store(false, SeqCst);
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
