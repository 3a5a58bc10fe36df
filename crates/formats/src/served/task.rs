//! Tasks of one worker, run on its thread: work that takes several steps.

use fathom_core::EventNotifier;
use parking_lot::Mutex;
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Blocks until the future is ready, on a thread that is not a worker.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(outcome) => return outcome,
            Poll::Pending => thread::park(),
        }
    }
}

/// The tasks that can make progress, and the eventfd that wakes their worker.
pub(super) struct Ready {
    queue: Mutex<Vec<usize>>,
    event: EventNotifier,
}

impl Ready {
    /// Wakes the worker to look for work that is not in the queue.
    pub(super) fn ring(&self) {
        self.event.notify();
    }
}

thread_local! {
    /// The executor that runs on this thread; it checks its queue again by itself.
    static RUNNING: Cell<*const Ready> = const { Cell::new(std::ptr::null()) };
}

struct TaskWaker {
    ready: Arc<Ready>,
    index: usize,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut queue = self.ready.queue.lock();
        queue.push(self.index);
        drop(queue);
        if RUNNING.get() != Arc::as_ptr(&self.ready) {
            self.ready.ring();
        }
    }
}

/// A slot for a task; its waker is reused for each task in the slot.
struct Place {
    task: Option<Task>,
    waker: Waker,
}

/// The tasks of one worker.
pub(super) struct Executor {
    ready: Arc<Ready>,
    places: Vec<Place>,
    free: Vec<usize>,
    /// Indexes of the tasks to poll; reused between runs.
    due: Vec<usize>,
}

impl Executor {
    pub(super) fn new() -> io::Result<Executor> {
        Ok(Executor {
            ready: Arc::new(Ready {
                queue: Mutex::default(),
                event: EventNotifier::new()?,
            }),
            places: Vec::new(),
            free: Vec::new(),
            due: Vec::new(),
        })
    }

    /// Returns the handle by which other threads wake the worker.
    pub(super) fn ready(&self) -> &Arc<Ready> {
        &self.ready
    }

    /// Returns the eventfd that is signalled when another thread has woken a task.
    pub(super) fn fd(&self) -> RawFd {
        self.ready.event.as_raw_fd()
    }

    /// Returns whether there is no task.
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Adds a task; `run` starts it.
    pub(super) fn spawn(&mut self, task: impl Future<Output = ()> + 'static) {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = self.places.len();
            let ready = self.ready.clone();
            self.places.push(Place {
                task: None,
                waker: Waker::from(Arc::new(TaskWaker { ready, index })),
            });
            index
        });
        self.places[index].task = Some(Box::pin(task));
        self.due.push(index);
    }

    /// Polls every task that can make progress; false if there was none.
    pub(super) fn run(&mut self) -> bool {
        let outer = RUNNING.replace(Arc::as_ptr(&self.ready));
        let mut queue = self.ready.queue.lock();
        self.due.append(&mut queue);
        drop(queue);
        let any = !self.due.is_empty();
        for index in std::mem::take(&mut self.due) {
            self.poll(index);
        }
        RUNNING.set(outer);
        any
    }

    fn poll(&mut self, index: usize) {
        let place = &mut self.places[index];
        let mut context = Context::from_waker(&place.waker);
        // The waker of an earlier task in this slot may have been late.
        let Some(task) = &mut place.task else { return };
        if let Poll::Ready(()) = task.as_mut().poll(&mut context) {
            place.task = None;
            self.free.push(index);
        }
    }
}
