//! The I/O of a worker's tasks, as children of the requests that they serve.

use super::io::{Buf, Errno, Io, Payload, StorageId};
use super::memo::{EPOCH, STORAGE, UNCOUNTED};
use super::pool::Pool;
use crate::HostOffset;
use fathom_core::extents::extents;
use fathom_core::{Channel, Cx, Extents, Op, Owner, RequestId, Stage, Stamps};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Maximum number of operations in flight of one worker's tasks; further ones are queued.
pub(super) const CHILDREN: usize = 128;

/// Bytes of the buffer for a storage's block status.
const STATUS_LEN: usize = 4096;

/// An operation to be submitted to a storage.
struct Ask {
    storage: StorageId,
    op: Op,
    at: HostOffset,
    len: u64,
    payload: Option<Payload>,
    /// The request that the operation belongs to, or `NOBODY`, and the request's stage meanwhile.
    parent: RequestId,
    stage: Stage,
}

/// The result of an operation, and the waker of the task that waits for it.
#[derive(Default)]
struct Outcome {
    result: Cell<Option<Result<(), Errno>>>,
    waker: Cell<Option<Waker>>,
    /// The operation's buffers, which live until the operation has ended, even if the task is
    /// dropped.
    payload: Cell<Option<Payload>>,
}

/// Connects the tasks, which queue operations, with the channel, which submits them.
pub(super) struct WorkerIo {
    owner: Owner,
    queue: RefCell<VecDeque<(Ask, Rc<Outcome>)>>,
    /// Indexed by the child's slot in the slab.
    in_flight: RefCell<Vec<Option<Rc<Outcome>>>>,
    count: Cell<usize>,
    pool: Rc<Pool>,
    /// Requests that have ended, with their error numbers.
    finished: RefCell<Vec<(RequestId, Errno)>>,
    /// Tasks that pause.
    pausing: RefCell<Vec<Waker>>,
    /// Slots of tasks without a request that have ended.
    left: RefCell<Vec<RequestId>>,
}

impl WorkerIo {
    pub(super) fn new(owner: Owner) -> WorkerIo {
        WorkerIo {
            owner,
            queue: RefCell::default(),
            in_flight: RefCell::default(),
            count: Cell::default(),
            pool: Rc::default(),
            finished: RefCell::default(),
            pausing: RefCell::default(),
            left: RefCell::default(),
        }
    }

    /// Takes a slot for a task that belongs to no request.
    pub(super) fn enter(&self, cx: &mut Cx) -> RequestId {
        let id = cx.slab.take().expect("room was made for one");
        let request = &mut cx.slab[id];
        request.stamps = Stamps::default();
        request.owner = self.owner;
        id
    }

    /// Releases the slot of such a task.
    pub(super) fn leave(&self, id: RequestId) {
        self.left.borrow_mut().push(id);
    }

    pub(super) fn next_left(&self) -> Option<RequestId> {
        self.left.borrow_mut().pop()
    }

    /// Returns whether a task pauses.
    pub(super) fn is_pausing(&self) -> bool {
        !self.pausing.borrow().is_empty()
    }

    /// Wakes the tasks that pause.
    pub(super) fn go_on(&self) {
        let pausing = std::mem::take(&mut *self.pausing.borrow_mut());
        pausing.into_iter().for_each(Waker::wake);
    }

    /// Returns the I/O of a task without a request. The task's operations count as in flight like
    /// others.
    pub(super) fn for_nobody(self: &Rc<Self>) -> TaskIo {
        TaskIo {
            worker: self.clone(),
            parent: RequestId::NOBODY,
        }
    }

    /// Notes that the request has ended.
    pub(super) fn finish(&self, id: RequestId, errno: Errno) {
        self.finished.borrow_mut().push((id, errno));
    }

    pub(super) fn next_finished(&self) -> Option<(RequestId, Errno)> {
        self.finished.borrow_mut().pop()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.count.get()
    }

    /// Submits queued operations to their storages; false if none could be submitted.
    pub(super) fn submit(&self, cx: &mut Cx, storages: &mut [Box<dyn Channel>]) -> bool {
        let mut any = false;
        while self.count.get() < CHILDREN {
            let Some((ask, outcome)) = self.queue.borrow_mut().pop_front() else {
                break;
            };
            let id = cx.slab.take().expect("room was made for all children");
            self.count.set(self.count.get() + 1);
            let stamps = match ask.parent {
                RequestId::NOBODY => Stamps::start(cx.now()),
                parent => {
                    cx.enter(parent, ask.stage);
                    cx.slab[parent].stamps
                }
            };
            let child = &mut cx.slab[id];
            child.stamps = stamps;
            child.owner = self.owner;
            child.op = ask.op;
            child.fua = false;
            child.unmap = ask.op == Op::Discard;
            child.error = 0;
            (child.offset, child.at, child.len) = (ask.at.0, ask.at.0, ask.len);
            (child.memo[STORAGE], child.memo[EPOCH]) = (ask.storage, UNCOUNTED);
            child.segments.clear();
            if let Some(payload) = ask.payload {
                child.segments.extend_from_slice(&payload.segments);
                outcome.payload.set(Some(payload));
            }
            let mut in_flight = self.in_flight.borrow_mut();
            let index = id.0 as usize;
            if in_flight.len() <= index {
                in_flight.resize(index + 1, None);
            }
            in_flight[index] = Some(outcome);
            drop(in_flight);
            storages[usize::from(ask.storage)].submit(cx, id);
            any = true;
        }
        any
    }

    /// Wakes the tasks of completed operations; false if there was none.
    pub(super) fn reap(&self, cx: &mut Cx) -> bool {
        let mut any = false;
        while let Some(id) = cx.child_done(self.owner) {
            let errno = cx.slab[id].error;
            cx.slab.put(id);
            self.count.set(self.count.get() - 1);
            let outcome = self.in_flight.borrow_mut()[id.0 as usize].take();
            let outcome = outcome.expect("children are in flight until they are done");
            outcome.result.set(Some(match errno {
                0 => Ok(()),
                errno => Err(errno),
            }));
            if let Some(waker) = outcome.waker.take() {
                waker.wake();
            }
            any = true;
        }
        any
    }
}

/// The I/O of one request's task.
#[derive(Clone)]
pub(super) struct TaskIo {
    pub(super) worker: Rc<WorkerIo>,
    pub(super) parent: RequestId,
}

impl TaskIo {
    fn start(&self, ask: Ask) -> Running {
        let outcome = Rc::new(Outcome::default());
        let queued = (ask, outcome.clone());
        self.worker.queue.borrow_mut().push_back(queued);
        Running(outcome)
    }

    fn ask(&self, storage: StorageId, op: Op, at: HostOffset, len: u64, stage: Stage) -> Ask {
        Ask {
            storage,
            op,
            at,
            len,
            payload: None,
            parent: self.parent,
            stage,
        }
    }

    /// Pauses the task for a while, so that others make progress.
    pub(super) async fn pause(&self) {
        let mut paused = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut paused, true) {
                return Poll::Ready(());
            }
            let waker = cx.waker().clone();
            self.worker.pausing.borrow_mut().push(waker);
            Poll::Pending
        })
        .await;
    }

    /// Returns a buffer of `len` bytes with unspecified contents.
    pub(super) fn buf(&self, len: usize) -> Buf {
        self.worker.pool.take(len)
    }

    /// Adds the storage's block status of a range to `out`; false if `out` is full.
    pub(super) async fn block_status(
        &self,
        storage: StorageId,
        mut at: HostOffset,
        len: u64,
        out: &mut Extents,
    ) -> Result<bool, Errno> {
        let end = at + len;
        let mut more = true;
        while more && at < end {
            let buf = Rc::new(self.buf(STATUS_LEN));
            let mut ask = self.ask(storage, Op::BlockStatus, at, end - at, Stage::Device);
            ask.payload = Some(Payload::of(buf.clone()));
            self.start(ask).await?;
            let before = at;
            for (status, len) in extents(buf.bytes()) {
                at += len;
                more = out.push(status, len);
                if !more {
                    break;
                }
            }
            if at == before {
                return Err(libc::EIO);
            }
        }
        Ok(more)
    }

    /// Reads or writes guest data.
    pub(super) fn data(
        &self,
        storage: StorageId,
        op: Op,
        at: HostOffset,
        payload: Payload,
    ) -> impl Future<Output = Result<(), Errno>> + use<> {
        let mut ask = self.ask(storage, op, at, payload.len(), Stage::Device);
        ask.payload = Some(payload);
        self.start(ask)
    }
}

impl Io for TaskIo {
    fn plain(
        &self,
        storage: StorageId,
        op: Op,
        at: HostOffset,
        len: u64,
    ) -> impl Future<Output = Result<(), Errno>> {
        self.start(self.ask(storage, op, at, len, Stage::Device))
    }

    fn read(
        &self,
        storage: StorageId,
        at: HostOffset,
        len: usize,
    ) -> impl Future<Output = Result<Buf, Errno>> {
        let mut ask = self.ask(storage, Op::Read, at, len as u64, Stage::Map);
        ask.payload = Some(Payload::of(Rc::new(self.buf(len))));
        let mut running = self.start(ask);
        async move {
            (&mut running).await?;
            let payload = running.0.payload.take();
            let buf = payload.and_then(|mut payload| payload.keep.pop());
            let buf = buf.and_then(|buf| Rc::try_unwrap(buf).ok());
            Ok(buf.expect("nobody else has the buffer of a read"))
        }
    }

    fn write(
        &self,
        storage: StorageId,
        at: HostOffset,
        buf: Buf,
    ) -> impl Future<Output = Result<(), Errno>> {
        let payload = Payload::of(Rc::new(buf));
        let mut ask = self.ask(storage, Op::Write, at, payload.len(), Stage::Map);
        ask.payload = Some(payload);
        self.start(ask)
    }
}

/// An operation in progress.
struct Running(Rc<Outcome>);

impl Future for Running {
    type Output = Result<(), Errno>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.0.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                self.0.waker.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}
