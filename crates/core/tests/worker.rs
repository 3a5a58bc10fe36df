//! Tests of the worker loop with a source and an engine that the test controls. The tests run on a
//! dedicated thread and in a pool together with other workers.

mod support;

#[path = "worker/suite.rs"]
mod dedicated;
#[path = "worker/pool.rs"]
mod pool;
#[allow(clippy::duplicate_mod)] // the same tests for another kind of worker
#[path = "worker/suite.rs"]
mod pooled;

use fathom_core::testing::{PollEngine, TestDisk};
use fathom_core::{Disk, Engine, Polling, Pool, WorkerHandle, WorkerOptions};
use fathom_testing::Deadline;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time for which a test polls without pauses. A worker replies within microseconds, and the test
/// must act while the worker still spins.
const SPIN: Duration = Duration::from_millis(2);

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let (start, deadline) = (Instant::now(), Deadline::new(what));
    while !condition() {
        match start.elapsed() < SPIN {
            true => std::thread::yield_now(),
            false => deadline.pause(),
        }
    }
}

fn options(polling: Polling) -> WorkerOptions {
    WorkerOptions {
        name: "test".into(),
        polling,
        cpus: Vec::new(),
    }
}

/// Starts a pool with `threads` threads.
fn pool(threads: usize, polling: Polling) -> Pool {
    pool_on(threads, polling, PollEngine::boxed)
}

fn pool_on(threads: usize, polling: Polling, engine: MakeEngine) -> Pool {
    let options = std::iter::repeat_n(options(polling), threads);
    Pool::start(options, engine).unwrap()
}

type MakeEngine = fn() -> io::Result<Box<dyn Engine>>;

/// Starts a worker of the kind that the test module `suite` names.
fn spawn(suite: &str, disk: &Arc<dyn Disk>, polling: Polling) -> WorkerHandle {
    spawn_on(suite, disk, polling, PollEngine::boxed)
}

fn spawn_on(
    suite: &str,
    disk: &Arc<dyn Disk>,
    polling: Polling,
    engine: MakeEngine,
) -> WorkerHandle {
    if !suite.contains("pooled") {
        return WorkerHandle::spawn(disk.clone(), engine, options(polling)).unwrap();
    }
    let pool = pool_on(1, polling, engine);
    // Not the first member of its thread: like a dedicated worker, that one has number 0.
    let other: Arc<dyn Disk> = TestDisk::new();
    let other = pool.join(&other, false).unwrap();
    let mut workers = pool.join(disk, false).unwrap();
    drop(other);
    workers.pop().unwrap()
}
