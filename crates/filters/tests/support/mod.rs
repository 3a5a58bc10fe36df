//! A worker with filters above a disk in memory, and a source whose peer is the test.

use fathom_core::testing::{PollEngine, TestDisk};
use fathom_core::{
    Broken, Clock, Cx, Disk, Op, Polling, Request, RequestId, Source, SourceId, Stage,
    WorkerHandle, WorkerOptions,
};
use fathom_filters::{Filter, Filters, wrap};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

pub use fathom_testing::{PATIENCE, until};

#[derive(Clone, Debug)]
pub struct Ask {
    pub op: Op,
    pub offset: u64,
    pub data: Vec<u8>,
    pub fua: bool,
}

impl Ask {
    pub fn read(offset: u64, len: usize) -> Ask {
        Ask {
            op: Op::Read,
            offset,
            data: vec![0xee; len],
            fua: false,
        }
    }

    pub fn write(offset: u64, data: Vec<u8>) -> Ask {
        Ask {
            op: Op::Write,
            offset,
            data,
            fua: false,
        }
    }

    pub fn flush() -> Ask {
        Ask {
            op: Op::Flush,
            offset: 0,
            data: Vec::new(),
            fua: false,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub number: u64,
    pub error: i32,
    pub data: Vec<u8>,
    /// Time that the request spent in the stage `queue`.
    pub queued: Duration,
    /// Time from pop to reply.
    pub took: Duration,
    /// Time of the reply, in ticks of the clock.
    pub at: u64,
}

/// The test's end of a source.
pub struct Peer {
    asks: Arc<Mutex<VecDeque<(u64, Ask)>>>,
    kick: Arc<OwnedFd>,
    answers: Receiver<Answer>,
    asked: u64,
    pub id: Option<SourceId>,
}

impl Peer {
    /// Attaches a new source to the worker.
    pub fn attach(worker: &WorkerHandle) -> Peer {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let kick = Arc::new(eventfd(0, flags).unwrap());
        let asks = Arc::default();
        let (sender, answers) = channel();
        let source = TestSource {
            asks: Arc::clone(&asks),
            kick: kick.clone(),
            answers: sender,
            buffers: (0..CAPACITY).map(|_| None).collect(),
        };
        Peer {
            asks,
            kick,
            answers,
            asked: 0,
            id: Some(worker.attach(Box::new(source)).unwrap()),
        }
    }

    /// Submits a request and returns its number.
    pub fn ask(&mut self, ask: Ask) -> u64 {
        self.ask_all([ask]);
        self.asked - 1
    }

    pub fn ask_all(&mut self, asks: impl IntoIterator<Item = Ask>) {
        let mut queue = self.asks.lock();
        for ask in asks {
            queue.push_back((self.asked, ask));
            self.asked += 1;
        }
        drop(queue);
        rustix::io::write(&*self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Waits until the worker has popped all requests. The worker submits them before it does
    /// anything else.
    pub fn popped(&self) {
        until("it is popped", || self.asks.lock().is_empty());
    }

    pub fn answer(&mut self) -> Answer {
        let answer = self.answers.recv_timeout(PATIENCE);
        answer.expect("the request is answered")
    }

    /// Returns a reply if there is one already.
    pub fn answer_now(&mut self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }

    pub fn answers(&mut self, n: usize) -> Vec<Answer> {
        (0..n).map(|_| self.answer()).collect()
    }

    /// Returns whether a request can take less than `time`. A busy machine delays some requests,
    /// but not all of them.
    pub fn may_take_less_than(&mut self, time: Duration, ask: Ask) -> bool {
        (0..100).any(|_| self.do_it(ask.clone()).took < time)
    }

    /// Executes one request and waits for its reply.
    pub fn do_it(&mut self, ask: Ask) -> Answer {
        self.ask(ask);
        self.answer()
    }
}

const CAPACITY: usize = 8192;

struct TestSource {
    asks: Arc<Mutex<VecDeque<(u64, Ask)>>>,
    kick: Arc<OwnedFd>,
    answers: Sender<Answer>,
    /// Number and memory of each request in flight, by tag.
    buffers: Vec<Option<(u64, Vec<u8>)>>,
}

impl Source for TestSource {
    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn kick_fd(&self) -> Option<RawFd> {
        Some(self.kick.as_raw_fd())
    }

    fn pending(&mut self) -> bool {
        !self.asks.lock().is_empty()
    }

    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        let mut asks = self.asks.lock();
        let mut free = (0..CAPACITY).filter(|tag| self.buffers[*tag].is_none());
        let tags: Vec<_> = free.by_ref().take(room.min(asks.len())).collect();
        for tag in tags {
            let (number, mut ask) = asks.pop_front().unwrap();
            let id = cx.slab.take().expect("room was promised");
            let request = &mut cx.slab[id];
            (request.op, request.fua, request.unmap) = (ask.op, ask.fua, false);
            (request.offset, request.len) = (ask.offset, ask.data.len() as u64);
            (request.tag, request.queue) = (tag as u16, 0);
            request.segments.clear();
            // In pieces, as guests submit data.
            for piece in ask.data.chunks_mut(1536) {
                request.segments.push(libc::iovec {
                    iov_base: piece.as_mut_ptr().cast(),
                    iov_len: piece.len(),
                });
            }
            self.buffers[tag] = Some((number, ask.data));
            batch.push(id);
        }
        Ok(0)
    }

    fn finish(&mut self, request: &Request) {
        let clock = Clock::get();
        let (number, data) = self.buffers[usize::from(request.tag)].take().unwrap();
        let now = clock.now();
        let spent = request.stamps.spent();
        // The test may have ended.
        let _ = self.answers.send(Answer {
            number,
            error: request.error,
            data,
            queued: clock.duration(spent[Stage::Queue as usize]),
            took: clock.duration(request.stamps.total() - spent[Stage::Wake as usize]),
            at: now,
        });
    }

    fn publish(&mut self, _: &mut Cx) -> bool {
        false
    }

    fn arm(&mut self) -> bool {
        self.pending()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// A disk behind filters, with its workers.
pub struct Bed {
    pub disk: Arc<TestDisk>,
    pub filters: Vec<Arc<dyn Filter>>,
    pub workers: Vec<WorkerHandle>,
}

impl Bed {
    /// Creates a disk with filters; the first filter is nearest to the source.
    pub fn new(specs: &[&str], workers: usize) -> Bed {
        Bed::of(TestDisk::new(), &Filters::default(), specs, workers)
    }

    pub fn of(disk: Arc<TestDisk>, all: &Filters, specs: &[&str], workers: usize) -> Bed {
        let make = |spec: &&str| all.make(&spec.parse().unwrap()).unwrap();
        let filters: Vec<_> = specs.iter().map(make).collect();
        let mut filtered: Arc<dyn Disk> = disk.clone();
        for filter in filters.iter().rev() {
            filtered = wrap(filtered, filter.clone());
        }
        let spawn = |n| {
            let options = WorkerOptions {
                name: format!("worker {n}"),
                polling: Polling::Off,
                cpus: Vec::new(),
            };
            WorkerHandle::spawn(filtered.clone(), PollEngine::boxed, options).unwrap()
        };
        Bed {
            workers: (0..workers).map(spawn).collect(),
            filters,
            disk,
        }
    }

    pub fn peer(&self) -> Peer {
        Peer::attach(&self.workers[0])
    }

    /// Changes settings like `fathom set`.
    pub fn set(&self, filter: usize, changes: &[(&str, &str)]) -> Result<(), String> {
        let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let changes: Vec<_> = changes.iter().map(own).collect();
        self.filters[filter].set(&changes)?;
        let mut heard = self.workers.iter().map(WorkerHandle::look);
        heard.try_for_each(|heard| heard.map_err(|e| e.to_string()))
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.disk.bytes.lock().clone()
    }
}
