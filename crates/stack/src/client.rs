//! A disk's only client: a source of requests whose peer is a thread.

use crate::pages::Pages;
use fathom_core::{
    Broken, Cx, Disk, DiskError, DiskInfo, Op, Owner, Polling, Request, RequestId, Source,
    SourceId, Wire, WorkerHandle, WorkerOptions,
};
use fathom_storage::EngineKind;
use libc::iovec;
use rustix::event::{EventfdFlags, eventfd};
use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Requests of one client in flight, at most; more wait their turn.
const CAPACITY: usize = 256;

/// What is asked of a disk. It goes by the rules of a [`Request`].
#[derive(Debug)]
pub struct Ask {
    pub op: Op,
    pub offset: u64,
    pub len: u64,
    /// Write zeroes: the range may be deallocated.
    pub unmap: bool,
    /// The memory to read to or to write from: its first `len` bytes, from `skip` on; for
    /// [`Op::BlockStatus`] all of it.
    pub pages: Option<Pages>,
    pub skip: usize,
    /// For who asks.
    pub tag: u64,
}

impl Ask {
    pub fn new(op: Op, offset: u64, len: u64, pages: Option<Pages>) -> Ask {
        Ask {
            op,
            offset,
            len,
            unmap: false,
            pages,
            skip: 0,
            tag: 0,
        }
    }
}

/// An [`Ask`] that is done.
#[derive(Debug)]
pub struct Answer {
    /// The client's number in its job.
    pub client: usize,
    pub ask: Ask,
    /// 0, or the positive errno it failed with.
    pub errno: i32,
}

/// What brings the answers of several clients to one thread.
pub struct Job {
    answers: Receiver<Answer>,
    /// Some that have come while another was waited for.
    kept: RefCell<VecDeque<Answer>>,
    sender: Sender<Answer>,
    /// Number of requests that the disks have answered.
    answered: Arc<AtomicU64>,
    clients: usize,
}

/// Between looks whether to wait on.
const TICK: Duration = Duration::from_millis(50);

/// The tag of what is waited for by itself.
const OWN: u64 = u64::MAX - 1;

impl Default for Job {
    fn default() -> Job {
        Job::counted_by(Arc::default())
    }
}

impl Job {
    /// A job that adds to `answered` when a disk answers one of its requests.
    pub fn counted_by(answered: Arc<AtomicU64>) -> Job {
        let (sender, answers) = channel();
        Job {
            answers,
            kept: RefCell::default(),
            sender,
            answered,
            clients: 0,
        }
    }

    /// The next answer of any client; the caller knows that there will be one.
    pub fn wait(&self) -> Answer {
        let kept = self.kept.borrow_mut().pop_front();
        kept.unwrap_or_else(|| self.answers.recv().expect("a sender is kept"))
    }

    /// The next answer, if one comes within that time.
    pub fn wait_for(&self, time: Duration) -> Option<Answer> {
        let kept = self.kept.borrow_mut().pop_front();
        kept.or_else(|| self.answers.recv_timeout(time).ok())
    }

    /// Asks, and waits for the answer; those of others that come meanwhile are kept.
    pub fn answer_to(&self, client: &Client, ask: Ask) -> Answer {
        let own = Ask { tag: OWN, ..ask };
        client.ask(own);
        loop {
            let answer = self.answers.recv().expect("a sender is kept");
            if answer.client == client.number && answer.ask.tag == OWN {
                return answer;
            }
            self.kept.borrow_mut().push_back(answer);
        }
    }

    /// Likewise, but for None as soon as it is to `stop`, where nobody asks anything more then.
    pub fn answer_unless(
        &self,
        client: &Client,
        ask: Ask,
        stop: &dyn Fn() -> bool,
    ) -> Option<Answer> {
        let own = Ask { tag: OWN, ..ask };
        client.ask(own);
        loop {
            match self.answers.recv_timeout(TICK) {
                Ok(answer) if answer.client == client.number && answer.ask.tag == OWN => {
                    return Some(answer);
                }
                Ok(answer) => self.kept.borrow_mut().push_back(answer),
                Err(_) if stop() => return None,
                Err(_) => {}
            }
        }
    }

    /// What has completed becomes durable; 0, or the errno it failed with.
    pub fn flush(&self, client: &Client) -> i32 {
        self.answer_to(client, Ask::new(Op::Flush, 0, 0, None))
            .errno
    }

    /// A worker for `disk`, which is activated, with one client.
    pub fn client(&mut self, disk: Arc<dyn Disk>, engine: EngineKind) -> Result<Client, DiskError> {
        let number = self.clients;
        self.clients += 1;
        let info = disk.info();
        let options = WorkerOptions {
            name: format!("disk {number}"),
            // The threads of a job do real work: none of them is to take another's CPU.
            polling: Polling::Off,
            ..WorkerOptions::default()
        };
        let worker = WorkerHandle::spawn(disk, move || fathom_storage::engine(engine), options)?;
        let failed = |source: io::Error| DiskError::Io {
            path: format!("disk {number}").into(),
            what: "cannot start a worker's channel",
            source,
        };
        let asked = Arc::new(Asked::new().map_err(failed)?);
        let source = Requests {
            asked: asked.clone(),
            answers: self.sender.clone(),
            answered: self.answered.clone(),
            number,
            in_flight: std::iter::repeat_with(|| None).take(CAPACITY).collect(),
            free: (0..CAPACITY as u16).collect(),
        };
        let id = worker.attach(Box::new(source)).map_err(failed)?;
        Ok(Client {
            number,
            info,
            asked,
            id,
            worker,
        })
    }
}

/// A worker's client. When it is dropped, what is in flight ends first.
pub struct Client {
    number: usize,
    info: DiskInfo,
    asked: Arc<Asked>,
    id: SourceId,
    worker: WorkerHandle,
}

impl Client {
    pub fn number(&self) -> usize {
        self.number
    }

    pub fn info(&self) -> &DiskInfo {
        &self.info
    }

    /// Starts it; its answer comes to the job.
    pub fn ask(&self, ask: Ask) {
        self.ask_all([ask]);
    }

    /// Starts all of them at once.
    pub fn ask_all(&self, asks: impl IntoIterator<Item = Ask>) {
        self.asked.push(asks);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.worker.detach(self.id);
    }
}

/// From the thread to the worker.
struct Asked {
    queue: Mutex<VecDeque<Ask>>,
    /// The queue's length.
    count: AtomicUsize,
    /// The worker wants to be kicked.
    armed: AtomicBool,
    kick: OwnedFd,
}

impl Asked {
    fn new() -> io::Result<Asked> {
        Ok(Asked {
            queue: Mutex::default(),
            count: AtomicUsize::new(0),
            armed: AtomicBool::new(false),
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Ask>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, asks: impl IntoIterator<Item = Ask>) {
        let mut queue = self.queue();
        queue.extend(asks);
        // Whoever arms looks at the count afterwards.
        self.count.store(queue.len(), Ordering::SeqCst);
        drop(queue);
        if self.armed.swap(false, Ordering::SeqCst) {
            // An eventfd's counter cannot overflow by ones.
            let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        }
    }

    fn pop(&self) -> Option<Ask> {
        let mut queue = self.queue();
        let ask = queue.pop_front();
        self.count.store(queue.len(), Ordering::SeqCst);
        ask
    }

    fn has_some(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }
}

/// The worker's end.
struct Requests {
    asked: Arc<Asked>,
    answers: Sender<Answer>,
    answered: Arc<AtomicU64>,
    number: usize,
    /// By the request's tag.
    in_flight: Vec<Option<Ask>>,
    free: Vec<u16>,
}

fn fill(request: &mut Request, ask: &mut Ask, tag: u16) {
    request.op = ask.op;
    request.fua = false;
    request.unmap = ask.unmap;
    request.queue = 0;
    request.wire = Wire::None;
    request.owner = Owner::SOURCE;
    request.tag = tag;
    request.offset = ask.offset;
    request.at = ask.offset;
    request.len = ask.len;
    request.segments.clear();
    if let Some(pages) = &mut ask.pages {
        let bytes = &mut pages.bytes_mut()[ask.skip..];
        let len = match ask.op {
            Op::Read | Op::Write => ask.len as usize,
            Op::BlockStatus => bytes.len(),
            Op::Flush | Op::Discard | Op::WriteZeroes => return,
        };
        let bytes = &mut bytes[..len];
        request.segments.push(iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: len,
        });
    }
}

impl Source for Requests {
    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn kick_fd(&self) -> Option<RawFd> {
        Some(self.asked.kick.as_raw_fd())
    }

    fn pending(&mut self) -> bool {
        !self.free.is_empty() && self.asked.has_some()
    }

    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        for _ in 0..room {
            if self.free.is_empty() {
                break;
            }
            let Some(mut ask) = self.asked.pop() else {
                break;
            };
            let tag = self.free.pop().expect("one is free");
            let id = cx.slab.take().expect("room was promised");
            fill(&mut cx.slab[id], &mut ask, tag);
            // The memory does not move with the value that owns it.
            self.in_flight[usize::from(tag)] = Some(ask);
            batch.push(id);
        }
        Ok(0)
    }

    fn finish(&mut self, request: &Request) {
        let ask = self.in_flight[usize::from(request.tag)].take();
        let ask = ask.expect("it is in flight");
        self.free.push(request.tag);
        self.answered.fetch_add(1, Ordering::Relaxed);
        // Without a receiver nobody waits for it.
        let _ = self.answers.send(Answer {
            client: self.number,
            ask,
            errno: request.error,
        });
    }

    fn publish(&mut self, _cx: &mut Cx) -> bool {
        false
    }

    fn arm(&mut self) -> bool {
        self.asked.armed.store(true, Ordering::SeqCst);
        self.pending()
    }

    fn disarm(&mut self) {
        self.asked.armed.store(false, Ordering::SeqCst);
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
