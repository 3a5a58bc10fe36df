//! Helper threads for work that takes CPU time or waits for files, so that workers never do.

use fathom_core::{ThreadKind, thread_starts};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

/// A small pool of threads, started with the first job and joined when the pool is dropped.
///
/// A drop discards the jobs that no thread has begun.
pub(crate) struct Helpers {
    shared: Arc<Shared>,
    most: usize,
    kind: ThreadKind,
}

struct Shared {
    work: Mutex<Work>,
    wake: Condvar,
}

#[derive(Default)]
struct Work {
    jobs: VecDeque<Box<dyn FnOnce() + Send>>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    stopping: bool,
}

impl Helpers {
    /// Creates a pool of at most `threads` threads; 0: jobs wait for [`Helpers::do_one`].
    pub(crate) fn new(threads: usize) -> Helpers {
        Helpers {
            shared: Arc::new(Shared {
                work: Mutex::default(),
                wake: Condvar::new(),
            }),
            most: threads,
            kind: ThreadKind::Helper,
        }
    }

    /// Creates another pool of the same size for jobs that may read and write files.
    pub(crate) fn for_files(&self) -> Helpers {
        let mut others = Helpers::new(self.most);
        others.kind = ThreadKind::Io;
        others
    }

    /// Returns whether the pool has at most one thread.
    pub(crate) fn is_one(&self) -> bool {
        self.most == 1
    }

    /// Returns the number of jobs that no thread has begun.
    pub(crate) fn waiting(&self) -> usize {
        self.shared.work.lock().jobs.len()
    }

    /// Runs the waiting job of this number on the calling thread; false if no such job waits.
    pub(crate) fn do_one(&self, number: usize) -> bool {
        let job = self.shared.work.lock().jobs.remove(number);
        job.map(|job| job()).is_some()
    }

    /// Runs `job` on one of the threads and returns its result.
    ///
    /// Jobs begin in the order in which their futures are first polled. A job whose future is
    /// dropped runs all the same. `None`: no thread could be started, the job has panicked, or the
    /// pool was dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let answer = Arc::new(Mutex::new(Answer::Awaited(None)));
        let promise = Promise(answer.clone());
        let accepted = self.accept(Box::new(move || {
            let done = catch_unwind(AssertUnwindSafe(job));
            promise.settle(done.ok());
        }));
        if !accepted {
            return None;
        }
        Awaiting(answer).await
    }

    fn accept(&self, job: Box<dyn FnOnce() + Send>) -> bool {
        let mut work = self.shared.work.lock();
        work.jobs.push_back(job);
        if work.jobs.len() > work.idle && work.threads.len() < self.most {
            let (shared, kind) = (self.shared.clone(), self.kind);
            let thread = std::thread::Builder::new().name("image helper".into());
            // If no thread can be started, the existing threads do the job.
            let body = move || {
                thread_starts(kind);
                shared.work();
            };
            work.threads.extend(thread.spawn(body));
        }
        let accepted = self.most == 0 || !work.threads.is_empty();
        if !accepted {
            work.jobs.clear();
        }
        drop(work);
        self.shared.wake.notify_one();
        accepted
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        let mut work = self.shared.work.lock();
        work.stopping = true;
        let (jobs, threads) = (
            std::mem::take(&mut work.jobs),
            std::mem::take(&mut work.threads),
        );
        drop(work);
        self.shared.wake.notify_all();
        drop(jobs);
        for thread in threads {
            // A job's panic was caught already, so this result says nothing.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Main loop of a thread.
    fn work(&self) {
        let mut work = self.work.lock();
        while !work.stopping {
            if let Some(job) = work.jobs.pop_front() {
                drop(work);
                job();
                work = self.work.lock();
                continue;
            }
            work.idle += 1;
            self.wake.wait(&mut work);
            work.idle -= 1;
        }
    }
}

/// The result of a job, shared by the thread and the future.
enum Answer<T> {
    Awaited(Option<Waker>),
    /// The job has ended; `None`: without a result.
    Settled(Option<T>),
    Taken,
}

/// The thread's side. If it is dropped unused, the job has no result.
struct Promise<T>(Arc<Mutex<Answer<T>>>);

impl<T> Promise<T> {
    fn settle(&self, value: Option<T>) {
        let mut answer = self.0.lock();
        if let Answer::Awaited(waker) = &mut *answer {
            let waker = waker.take();
            *answer = Answer::Settled(value);
            drop(answer);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.settle(None);
    }
}

/// The future's side.
struct Awaiting<T>(Arc<Mutex<Answer<T>>>);

impl<T> Future for Awaiting<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut answer = self.0.lock();
        match &mut *answer {
            Answer::Awaited(waker) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            settled => match std::mem::replace(settled, Answer::Taken) {
                Answer::Settled(value) => Poll::Ready(value),
                _ => Poll::Ready(None),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::task::Wake;
    use std::thread::{self, Thread, ThreadId};

    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let waker = Arc::new(Unpark(thread::current())).into();
        let mut future = pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(value) => return value,
                Poll::Pending => thread::park(),
            }
        }
    }

    fn poll_once<T>(future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn threads_of(helpers: &Helpers) -> usize {
        helpers.shared.work.lock().threads.len()
    }

    #[test]
    fn jobs_are_done_elsewhere() {
        let helpers = Helpers::new(2);
        assert_eq!(threads_of(&helpers), 0);
        let elsewhere = block_on(helpers.run(|| thread::current().id()));
        assert_ne!(elsewhere, Some(thread::current().id()));
        for n in 0..1000 {
            assert_eq!(block_on(helpers.run(move || n + 1)), Some(n + 1));
        }
        assert!(threads_of(&helpers) <= 2);
    }

    #[test]
    fn as_many_at_once_as_there_are_threads() {
        const THREADS: usize = 3;
        let helpers = Helpers::new(THREADS);
        let barrier = Arc::new(std::sync::Barrier::new(THREADS));
        let job = || {
            let barrier = barrier.clone();
            helpers.run(move || {
                barrier.wait();
                thread::current().id()
            })
        };
        let mut jobs: Vec<_> = (0..3 * THREADS).map(|_| Box::pin(job())).collect();
        for job in &mut jobs {
            assert!(poll_once(job.as_mut()).is_pending());
        }
        let ids: HashSet<ThreadId> = jobs.into_iter().map(|j| block_on(j).unwrap()).collect();
        assert_eq!(ids.len(), THREADS);
        assert_eq!(threads_of(&helpers), THREADS);
    }

    #[test]
    fn a_job_that_panics_has_no_answer_and_harms_no_other() {
        let helpers = Helpers::new(1);
        let panicked = block_on(helpers.run(|| -> u8 { panic!("as the test wants it") }));
        assert_eq!(panicked, None);
        assert_eq!(block_on(helpers.run(|| 1)), Some(1));
    }

    #[test]
    fn a_job_is_done_even_if_nobody_waits_for_it() {
        let helpers = Helpers::new(1);
        let (sender, receiver) = mpsc::channel();
        {
            let mut future = pin!(helpers.run(move || sender.send(1)));
            let _ = poll_once(future.as_mut());
        }
        assert_eq!(receiver.recv(), Ok(1));
    }

    #[test]
    fn what_has_not_begun_at_the_end_is_dropped() {
        let helpers = Helpers::new(1);
        let done = Arc::new(AtomicUsize::new(0));
        let (go, wait) = mpsc::channel::<()>();
        let (started, begun) = mpsc::channel();
        // The shared result outlives the pool.
        let count = |done: &Arc<AtomicUsize>| {
            let done = done.clone();
            move || done.fetch_add(1, Ordering::Relaxed)
        };
        let first = count(&done);
        let answer = Arc::new(Mutex::new(Answer::<usize>::Awaited(None)));
        let promise = Promise(answer.clone());
        assert!(helpers.accept(Box::new(move || {
            started.send(()).unwrap();
            let _ = wait.recv();
            first();
        })));
        begun.recv().unwrap();
        let second = count(&done);
        assert!(helpers.accept(Box::new(move || promise.settle(Some(second())))));
        let ending = thread::spawn(move || drop(helpers));
        assert_eq!(block_on(Awaiting(answer)), None);
        drop(go);
        ending.join().unwrap();
        assert_eq!(done.load(Ordering::Relaxed), 1);
    }
}
