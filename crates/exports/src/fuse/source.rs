//! Passes tasks to a worker.

use super::task::{STATUS_LEN, Task};
use fathom_core::{Broken, Cx, EventNotifier, Op, Owner, Request, RequestId, Source, Wire};
use fuser::Errno;
use libc::iovec;
use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Maximum number of tasks, in the queue and in flight together.
pub(super) const CAPACITY: usize = 64;

/// A completed task with 0, or the positive errno of its failure.
pub(super) type Completed = (Task, i32);

/// The sender's end of the queue of tasks.
pub(super) struct Queue {
    tasks: SyncSender<Task>,
    shared: Arc<Signals>,
}

/// State of the queue that both ends share.
struct Signals {
    /// Number of tasks in the queue.
    waiting: AtomicUsize,
    /// Number of tasks that the worker has in flight.
    in_flight: AtomicUsize,
    /// Whether tasks stay in the queue.
    is_paused: AtomicBool,
    /// Whether the worker needs a kick.
    armed: AtomicBool,
    kick: EventNotifier,
}

/// Creates both ends of a queue, and the receiver of completed tasks.
pub(super) fn queue() -> io::Result<(Queue, FuseSource, Receiver<Completed>)> {
    let shared = Arc::new(Signals {
        waiting: AtomicUsize::new(0),
        in_flight: AtomicUsize::new(0),
        is_paused: AtomicBool::new(false),
        armed: AtomicBool::new(false),
        kick: EventNotifier::new()?,
    });
    // (No send waits, because there are at most `CAPACITY` tasks.)
    let (tasks, waiting) = sync_channel(CAPACITY);
    let (completed, replies) = sync_channel(CAPACITY);
    let queue = Queue {
        tasks,
        shared: shared.clone(),
    };
    let source = FuseSource {
        waiting,
        completed,
        shared,
        in_flight: std::iter::repeat_with(|| None).take(CAPACITY).collect(),
        free: (0..CAPACITY as u16).collect(),
    };
    Ok((queue, source, replies))
}

impl Queue {
    /// Adds a task. Returns the task if a stuck worker has lost the other end of the queue.
    pub(super) fn push(&self, task: Task) -> Result<(), Box<Task>> {
        self.tasks.send(task).map_err(|unsent| Box::new(unsent.0))?;
        self.shared.waiting.fetch_add(1, SeqCst);
        self.kick();
        Ok(())
    }

    /// Number of tasks that the worker has in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.shared.in_flight.load(SeqCst)
    }

    /// Keeps tasks in the queue, or passes them on again.
    pub(super) fn set_paused(&self, is_paused: bool) {
        self.shared.is_paused.store(is_paused, SeqCst);
        if !is_paused {
            self.kick();
        }
    }

    fn kick(&self) {
        if self.shared.armed.swap(false, SeqCst) {
            self.shared.kick.notify();
        }
    }
}

/// The worker's end of the queue, which can move to another worker without losing tasks.
pub(super) struct FuseSource {
    waiting: Receiver<Task>,
    completed: SyncSender<Completed>,
    shared: Arc<Signals>,
    /// The tasks in flight, by tag.
    in_flight: Vec<Option<Task>>,
    free: Vec<u16>,
}

impl FuseSource {
    /// Fails the tasks in the queue. The source must not be attached.
    pub(super) fn fail_waiting(&self, errno: i32) {
        while let Ok(task) = self.waiting.try_recv() {
            self.shared.waiting.fetch_sub(1, SeqCst);
            if let Err(unsent) = self.completed.send((task, errno)) {
                // Without a reply thread.
                unsent.0.0.then.fail(Errno::from_i32(errno));
            }
        }
    }
}

/// Sets the request's fields for a task, which must not move its buffer's memory meanwhile.
fn fill(request: &mut Request, task: &mut Task, tag: u16) {
    request.op = task.op;
    request.fua = false;
    request.unmap = task.unmap;
    request.queue = 0;
    request.wire = Wire::None;
    request.owner = Owner::SOURCE;
    request.tag = tag;
    request.offset = task.offset;
    request.at = task.offset;
    request.len = task.len;
    request.segments.clear();
    let len = match task.op {
        Op::Read | Op::Write => task.len as usize,
        Op::BlockStatus => STATUS_LEN,
        Op::Flush | Op::Discard | Op::WriteZeroes => return,
    };
    let bytes = &mut task.buffer.bytes_mut()[..len];
    request.segments.push(iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: len,
    });
}

impl Source for FuseSource {
    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn kick_fd(&self) -> Option<RawFd> {
        Some(self.shared.kick.as_raw_fd())
    }

    fn pending(&mut self) -> bool {
        self.shared.waiting.load(SeqCst) > 0
            && !self.free.is_empty()
            && !self.shared.is_paused.load(SeqCst)
    }

    fn pop(&mut self, cx: &mut Cx, room: usize, batch: &mut Vec<RequestId>) -> Result<u32, Broken> {
        for _ in 0..room {
            if !self.pending() {
                break;
            }
            // Counted first, so that a pause of the queue misses no task that leaves it.
            self.shared.in_flight.fetch_add(1, SeqCst);
            let Ok(mut task) = self.waiting.try_recv() else {
                self.shared.in_flight.fetch_sub(1, SeqCst);
                break;
            };
            self.shared.waiting.fetch_sub(1, SeqCst);
            let tag = self.free.pop().expect("one is free");
            let id = cx.slab.take().expect("room was promised");
            fill(&mut cx.slab[id], &mut task, tag);
            // The buffer does not move when its owner does.
            self.in_flight[usize::from(tag)] = Some(task);
            batch.push(id);
        }
        Ok(0)
    }

    fn finish(&mut self, request: &Request) {
        let task = self.in_flight[usize::from(request.tag)].take();
        let task = task.expect("it is in flight");
        self.free.push(request.tag);
        self.shared.in_flight.fetch_sub(1, SeqCst);
        // Without a receiver, the file has been unmounted.
        let _ = self.completed.send((task, request.error));
    }

    fn publish(&mut self, _cx: &mut Cx) -> bool {
        false
    }

    fn arm(&mut self) -> bool {
        self.shared.armed.store(true, SeqCst);
        self.pending()
    }

    fn disarm(&mut self) {
        self.shared.armed.store(false, SeqCst);
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
