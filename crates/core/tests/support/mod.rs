//! A source whose peer is the test, a disk that answers when it is told to,
//! and the smallest engine that a worker can sleep in.

use fathom_core::{
    Broken, Channel, Completion, Cx, Disk, DiskError, DiskInfo, Engine, FileId, Io, Op, Request,
    RequestId, Source, Stage, Token, Wait,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

/// The other side of a [`TestSource`]: what a guest would be.
pub struct Peer {
    kick: OwnedFd,
    wants_kicks: AtomicBool,
    broken: AtomicBool,
    echoes: AtomicU64,
    offered: AtomicU64,
    popped: AtomicU64,
    visible: AtomicU64,
    published: AtomicU64,
    notified: AtomicU64,
}

impl Peer {
    pub fn new() -> Arc<Peer> {
        Arc::new(Peer {
            kick: new_eventfd(),
            wants_kicks: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            echoes: AtomicU64::new(0),
            offered: AtomicU64::new(0),
            popped: AtomicU64::new(0),
            visible: AtomicU64::new(0),
            published: AtomicU64::new(0),
            notified: AtomicU64::new(0),
        })
    }

    /// Make requests available and kick only if asked to.
    pub fn offer(&self, n: u64) {
        self.offered.fetch_add(n, SeqCst);
        if self.wants_kicks.load(SeqCst) {
            signal(&self.kick);
        }
    }

    /// Offer a request each time that answers are published, `n` times: a
    /// guest that is quicker than the worker's next look.
    pub fn echo(&self, n: u64) {
        self.echoes.store(n, SeqCst);
    }

    pub fn break_protocol(&self) {
        self.broken.store(true, SeqCst);
    }

    pub fn popped(&self) -> u64 {
        self.popped.load(SeqCst)
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
    capacity: usize,
    finished: u64,
}

impl TestSource {
    pub fn boxed(peer: &Arc<Peer>, capacity: usize) -> Box<dyn Source> {
        Box::new(TestSource {
            peer: peer.clone(),
            capacity,
            finished: 0,
        })
    }
}

impl Source for TestSource {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn kick_fd(&self) -> RawFd {
        self.peer.kick.as_raw_fd()
    }

    fn pending(&mut self) -> bool {
        self.peer.offered.load(SeqCst) > self.peer.popped.load(SeqCst)
    }

    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        if self.peer.broken.load(SeqCst) {
            // A malformed request before the one that breaks the rules.
            self.finished += 1;
            return Err(Broken("the test broke it".into()));
        }
        let available = self.peer.offered.load(SeqCst) - self.peer.popped.load(SeqCst);
        for _ in 0..available.min(room as u64) {
            let id = cx.slab.take().expect("room was promised");
            cx.slab[id].op = Op::Read;
            batch.push(id);
            self.peer.popped.fetch_add(1, SeqCst);
        }
        Ok(0)
    }

    fn finish(&mut self, _request: &Request) {
        self.finished += 1;
    }

    fn publish(&mut self) -> bool {
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

#[derive(Default)]
struct Held {
    requests: Vec<RequestId>,
    /// The engine's eventfd and list of completions, once it exists.
    line: Option<Arc<Line>>,
}

/// How another thread completes something in a [`ManualEngine`].
pub struct Line {
    wake: OwnedFd,
    completions: Mutex<Vec<Completion>>,
}

thread_local! {
    static LINE: Arc<Line> = Arc::new(Line {
        wake: new_eventfd(),
        completions: Mutex::new(Vec::new()),
    });
}

/// Completes its requests at once, or when the test says so.
pub struct ManualDisk {
    hold: Arc<AtomicBool>,
    held: Arc<Mutex<Held>>,
}

impl ManualDisk {
    pub fn completing_at_once() -> Arc<ManualDisk> {
        Arc::new(ManualDisk {
            hold: Arc::default(),
            held: Arc::default(),
        })
    }

    pub fn holding() -> Arc<ManualDisk> {
        let disk = ManualDisk::completing_at_once();
        disk.hold.store(true, SeqCst);
        disk
    }

    pub fn held(&self) -> usize {
        self.held.lock().unwrap().requests.len()
    }

    /// Complete what is held, in one batch, and hold nothing from now on.
    pub fn release(&self) {
        let mut held = self.held.lock().unwrap();
        self.hold.store(false, SeqCst);
        let line = held.line.clone().expect("a worker has started");
        let done = held.requests.drain(..).map(|id| Completion {
            token: Token::request(id, 0),
            result: 0,
        });
        line.completions.lock().unwrap().extend(done);
        signal(&line.wake);
    }
}

impl Disk for ManualDisk {
    fn info(&self) -> DiskInfo {
        unreachable!("the worker does not ask")
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, _engine: &mut dyn Engine) -> Result<Box<dyn Channel>, DiskError> {
        self.held.lock().unwrap().line = Some(LINE.with(Arc::clone));
        Ok(Box::new(ManualChannel {
            held: self.held.clone(),
            hold: self.hold.clone(),
        }))
    }
}

struct ManualChannel {
    held: Arc<Mutex<Held>>,
    hold: Arc<AtomicBool>,
}

impl Channel for ManualChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        let mut held = self.held.lock().unwrap();
        if self.hold.load(SeqCst) {
            held.requests.push(id);
        } else {
            cx.complete(id, 0);
        }
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, _tag: u16, _result: i32) {
        cx.complete(id, 0);
    }
}

/// Sleeps in poll(2); its I/O completes through its [`Line`].
pub struct ManualEngine {
    line: Arc<Line>,
    watched: Vec<(RawFd, Token)>,
}

impl ManualEngine {
    pub fn boxed() -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(ManualEngine {
            line: LINE.with(Arc::clone),
            watched: Vec::new(),
        }))
    }
}

impl Engine for ManualEngine {
    fn name(&self) -> &'static str {
        "manual"
    }

    fn reserve(&mut self, _n: usize) -> io::Result<()> {
        Ok(())
    }

    fn add_file(&mut self, _file: BorrowedFd<'_>) -> io::Result<FileId> {
        unreachable!("the disk has no file")
    }

    fn remove_file(&mut self, _file: FileId) {}

    unsafe fn push(&mut self, _io: Io, _token: Token) {
        unreachable!("the disk has no file")
    }

    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()> {
        self.watched.push((fd, token));
        Ok(())
    }

    fn unwatch(&mut self, fd: RawFd, token: Token) {
        self.watched.retain(|entry| *entry != (fd, token));
    }

    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        let wake = self.line.wake.as_raw_fd();
        let fds: Vec<RawFd> = self.watched.iter().map(|w| w.0).chain([wake]).collect();
        let mut polled: Vec<PollFd<'_>> = fds
            .iter()
            // SAFETY: watched until unwatched, so open.
            .map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) })
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let at_once = Timespec::default();
        poll(&mut polled, (wait == Wait::No).then_some(&at_once))?;
        for (entry, (_, token)) in polled.iter().zip(&self.watched) {
            if !entry.revents().is_empty() {
                let _ = rustix::io::read(entry, &mut [0u8; 8]);
                let token = *token;
                out.push(Completion { token, result: 0 });
            }
        }
        let _ = rustix::io::read(&self.line.wake, &mut [0u8; 8]);
        out.append(&mut self.line.completions.lock().unwrap());
        Ok(())
    }

    fn ready(&mut self) -> bool {
        !self.line.completions.lock().unwrap().is_empty()
    }
}
