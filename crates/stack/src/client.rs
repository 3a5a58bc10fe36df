//! A client of a disk within this process: a request source controlled by a thread.

use fathom_core::{
    AlignedBuffer, Broken, Cx, Disk, DiskError, DiskInfo, EventNotifier, Op, Owner, Polling,
    Request, RequestId, Source, SourceId, Wire, WorkerHandle, WorkerOptions,
};
use fathom_storage::EngineKind;
use libc::iovec;
use parking_lot::Mutex;
use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Maximum requests of one client in flight; further ones are queued.
const CAPACITY: usize = 256;

/// A request to a disk. The rules of [`Request`] apply.
#[derive(Debug)]
pub struct DiskRequest {
    /// Operation to carry out.
    pub op: Op,
    /// Offset of the range on the disk in bytes.
    pub offset: u64,
    /// Length of the range in bytes; 0 for a flush.
    pub len: u64,
    /// Whether write zeroes may deallocate the range.
    pub unmap: bool,
    /// The buffer for the data: `len` bytes from `skip` on; for [`Op::BlockStatus`] all of it.
    pub pages: Option<AlignedBuffer>,
    /// Number of bytes in `pages` before the data.
    pub skip: usize,
    /// A value for the caller's use, returned in the reply.
    pub tag: u64,
}

impl DiskRequest {
    /// Creates a request with tag 0, whose data is at the start of `pages`.
    pub fn new(op: Op, offset: u64, len: u64, pages: Option<AlignedBuffer>) -> DiskRequest {
        DiskRequest {
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

/// A completed [`DiskRequest`].
#[derive(Debug)]
pub struct DiskReply {
    /// The client's number in its job.
    pub client: usize,
    /// The request, which returns its buffer to the caller.
    pub ask: DiskRequest,
    /// Zero, or the positive errno of the failure.
    pub errno: i32,
}

/// Collects the replies of several clients for one thread.
pub struct Job {
    answers: Receiver<DiskReply>,
    /// Replies that arrived while the thread waited for another one.
    kept: RefCell<VecDeque<DiskReply>>,
    sender: Sender<DiskReply>,
    /// Number of requests that the disks have completed.
    answered: Arc<AtomicU64>,
    clients: usize,
}

/// Interval between two checks for cancellation.
const TICK: Duration = Duration::from_millis(50);

/// The tag of requests whose reply is awaited separately.
const OWN: u64 = u64::MAX - 1;

impl Default for Job {
    fn default() -> Job {
        Job::counted_by(Arc::default())
    }
}

impl Job {
    /// Creates a job that increments `answered` for each of its requests that a disk completes.
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

    /// Waits for the next reply of any client. The caller knows that a request is in flight.
    pub fn wait(&self) -> DiskReply {
        let kept = self.kept.borrow_mut().pop_front();
        kept.unwrap_or_else(|| self.answers.recv().expect("a sender is kept"))
    }

    /// Waits for the next reply for `time` at most.
    pub fn wait_for(&self, time: Duration) -> Option<DiskReply> {
        let kept = self.kept.borrow_mut().pop_front();
        kept.or_else(|| self.answers.recv_timeout(time).ok())
    }

    /// Submits a request and waits for its reply. Other replies that arrive meanwhile are kept.
    pub fn answer_to(&self, client: &Client, ask: DiskRequest) -> DiskReply {
        let own = DiskRequest { tag: OWN, ..ask };
        client.ask(own);
        loop {
            let answer = self.answers.recv().expect("a sender is kept");
            if answer.client == client.number && answer.ask.tag == OWN {
                return answer;
            }
            self.kept.borrow_mut().push_back(answer);
        }
    }

    /// Like [`Job::answer_to`], but returns `None` as soon as `stop` returns true.
    ///
    /// The caller must not submit such requests to the client any more after `None`.
    pub fn answer_unless(
        &self,
        client: &Client,
        ask: DiskRequest,
        stop: &dyn Fn() -> bool,
    ) -> Option<DiskReply> {
        let own = DiskRequest { tag: OWN, ..ask };
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

    /// Flushes the disk. Returns zero, or the errno of the failure.
    pub fn flush(&self, client: &Client) -> i32 {
        self.answer_to(client, DiskRequest::new(Op::Flush, 0, 0, None))
            .errno
    }

    /// Starts a worker with one client for `disk`, which must be activated.
    pub fn client(&mut self, disk: Arc<dyn Disk>, engine: EngineKind) -> Result<Client, DiskError> {
        let number = self.clients;
        self.clients += 1;
        let info = disk.info();
        let options = WorkerOptions {
            name: format!("disk {number}"),
            // The threads of a job do real work: none may poll on a CPU that another one needs.
            polling: Polling::Off,
            ..WorkerOptions::default()
        };
        let worker = WorkerHandle::spawn(disk, move || fathom_storage::engine(engine), options)?;
        let failed = |source: io::Error| DiskError::Io {
            path: format!("disk {number}").into(),
            what: "cannot start a worker's channel",
            source,
        };
        let asked = Arc::new(RequestQueue::new().map_err(failed)?);
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

/// A client of a worker. Dropping it waits for its requests in flight.
pub struct Client {
    number: usize,
    info: DiskInfo,
    asked: Arc<RequestQueue>,
    id: SourceId,
    worker: WorkerHandle,
}

impl Client {
    /// Returns the number of the client in its job, as in [`DiskReply::client`].
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns the properties that the disk had when the client was created.
    pub fn info(&self) -> &DiskInfo {
        &self.info
    }

    /// Submits a request, whose reply goes to the job.
    pub fn ask(&self, ask: DiskRequest) {
        self.ask_all([ask]);
    }

    /// Submits several requests at once.
    pub fn ask_all(&self, asks: impl IntoIterator<Item = DiskRequest>) {
        self.asked.push(asks);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.worker.detach(self.id);
    }
}

/// The queue of requests from the thread to the worker.
struct RequestQueue {
    queue: Mutex<VecDeque<DiskRequest>>,
    /// Length of the queue.
    count: AtomicUsize,
    /// Whether the worker needs a kick.
    armed: AtomicBool,
    kick: EventNotifier,
}

impl RequestQueue {
    fn new() -> io::Result<RequestQueue> {
        Ok(RequestQueue {
            queue: Mutex::default(),
            count: AtomicUsize::new(0),
            armed: AtomicBool::new(false),
            kick: EventNotifier::new()?,
        })
    }

    fn push(&self, asks: impl IntoIterator<Item = DiskRequest>) {
        let mut queue = self.queue.lock();
        queue.extend(asks);
        // A worker that arms checks the count after that.
        self.count.store(queue.len(), Ordering::SeqCst);
        drop(queue);
        if self.armed.swap(false, Ordering::SeqCst) {
            self.kick.notify();
        }
    }

    fn pop(&self) -> Option<DiskRequest> {
        let mut queue = self.queue.lock();
        let ask = queue.pop_front();
        self.count.store(queue.len(), Ordering::SeqCst);
        ask
    }

    fn has_some(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }
}

/// The worker's end of the queue.
struct Requests {
    asked: Arc<RequestQueue>,
    answers: Sender<DiskReply>,
    answered: Arc<AtomicU64>,
    number: usize,
    /// The requests in flight, by tag.
    in_flight: Vec<Option<DiskRequest>>,
    free: Vec<u16>,
}

fn fill(request: &mut Request, ask: &mut DiskRequest, tag: u16) {
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
            // The buffer does not move when its owner does.
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
        // Without a receiver, no thread waits for the reply.
        let _ = self.answers.send(DiskReply {
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
