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

/// Operations of one worker's tasks in flight; more wait their turn.
pub(super) const CHILDREN: usize = 128;

/// Bytes of a storage's answer about a range.
const STATUS_LEN: usize = 4096;

/// What is asked of a storage.
struct Ask {
    storage: StorageId,
    op: Op,
    at: HostOffset,
    len: u64,
    payload: Option<Payload>,
    /// The request that waits for it, if any does, and the stage that it is in meanwhile.
    parent: RequestId,
    stage: Stage,
}

/// An operation's outcome, and who waits for it.
#[derive(Default)]
struct Outcome {
    result: Cell<Option<Result<(), Errno>>>,
    waker: Cell<Option<Waker>>,
    /// Its buffers, which outlive it whatever becomes of the task.
    payload: Cell<Option<Payload>>,
}

/// Between the tasks, which queue operations, and the channel, which carries
/// them out.
pub(super) struct WorkerIo {
    owner: Owner,
    queue: RefCell<VecDeque<(Ask, Rc<Outcome>)>>,
    /// By the child's index in the slab.
    in_flight: RefCell<Vec<Option<Rc<Outcome>>>>,
    count: Cell<usize>,
    pool: Rc<Pool>,
    /// Requests that are done.
    finished: RefCell<Vec<(RequestId, Errno)>>,
    /// Tasks that look again after a while.
    pausing: RefCell<Vec<Waker>>,
    /// Slots of tasks that were nobody's request, and are done.
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

    /// A task that is nobody's request has a slot like one.
    pub(super) fn enter(&self, cx: &mut Cx) -> RequestId {
        let id = cx.slab.take().expect("room was made for one");
        let request = &mut cx.slab[id];
        request.stamps = Stamps::default();
        request.owner = self.owner;
        id
    }

    /// It is done.
    pub(super) fn leave(&self, id: RequestId) {
        self.left.borrow_mut().push(id);
    }

    pub(super) fn next_left(&self) -> Option<RequestId> {
        self.left.borrow_mut().pop()
    }

    /// Whether a task wants to look again after a while.
    pub(super) fn is_pausing(&self) -> bool {
        !self.pausing.borrow().is_empty()
    }

    /// It is time to.
    pub(super) fn go_on(&self) {
        let pausing = std::mem::take(&mut *self.pausing.borrow_mut());
        pausing.into_iter().for_each(Waker::wake);
    }

    /// The I/O of a task that no request waits for. Its operations are in flight like those of others.
    pub(super) fn for_nobody(self: &Rc<Self>) -> TaskIo {
        TaskIo {
            worker: self.clone(),
            parent: RequestId::NOBODY,
        }
    }

    /// The request is done.
    pub(super) fn finish(&self, id: RequestId, errno: Errno) {
        self.finished.borrow_mut().push((id, errno));
    }

    pub(super) fn next_finished(&self) -> Option<(RequestId, Errno)> {
        self.finished.borrow_mut().pop()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.count.get()
    }

    /// Hands queued operations to their storages. False when there was none
    /// that could be.
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

    /// Tells the tasks of operations that are complete. False when none is.
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

    /// Lets others go on for a while.
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

    /// Memory for `len` bytes, with anything in it.
    pub(super) fn buf(&self, len: usize) -> Buf {
        self.worker.pool.take(len)
    }

    /// What the storage knows of a range, added to `out`. False: enough is
    /// said.
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

    /// Moves guest data.
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

/// An operation under way.
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
