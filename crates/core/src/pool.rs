//! A pool of threads that many disks share.

use crate::disk::{Disk, DiskError};
use crate::engine::Engine;
use crate::handle::WorkerHandle;
use crate::pooled::Pooled;
use crate::seat::{PoolThread, Seat};
use crate::thread::{self, Parts, WorkerOptions, failed};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Threads that each run the workers of many disks on one engine. The disks take turns, so that
/// each gets an equal share of a thread. But a disk that blocks a worker also blocks the other
/// workers of the thread; an example is a guest whose memory pages do not arrive.
///
/// The threads end when the pool and all its workers are gone.
pub struct Pool {
    threads: Vec<Arc<PoolThread>>,
    /// Held while a disk chooses its first thread.
    choosing: Mutex<()>,
}

impl Pool {
    /// Starts the threads, at least one. Calls `engine` on each of them.
    pub fn start(
        threads: impl IntoIterator<Item = WorkerOptions>,
        engine: impl Fn() -> io::Result<Box<dyn Engine>> + Clone + Send + 'static,
    ) -> Result<Pool, DiskError> {
        let threads = threads.into_iter().map(|options| {
            let name = options.name.clone();
            let body = move |Parts {
                                 engine,
                                 inbox,
                                 poller,
                             }| {
                let pooled = Pooled::new(engine, inbox, poller);
                let pooled = pooled.map_err(failed(&name, "cannot start"))?;
                Ok(move || pooled.run())
            };
            let started = thread::start(options, engine.clone(), body)?;
            Ok(Arc::new(PoolThread::new(started)))
        });
        Ok(Pool {
            threads: threads.collect::<Result<_, DiskError>>()?,
            choosing: Mutex::default(),
        })
    }

    /// Returns the number of threads.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Returns the CPU time that each thread has used.
    pub fn cpu_times(&self) -> Vec<Duration> {
        let threads = self.threads.iter();
        let times = threads.map(|thread| thread.id().cpu_time().unwrap_or_default());
        times.collect()
    }

    /// Creates a worker for `disk` on each thread. The first worker has the most work if the disk
    /// has few queues, so it goes to the thread with the fewest first workers. `pin_memory`: see
    /// [`Engine::pin_memory`].
    pub fn join(
        &self,
        disk: &Arc<dyn Disk>,
        pin_memory: bool,
    ) -> Result<Vec<WorkerHandle>, DiskError> {
        let seats: Vec<_> = {
            let _choosing = self.choosing.lock();
            let all = 0..self.threads.len();
            let first = all.min_by_key(|index| self.threads[*index].firsts());
            let first = first.unwrap_or(0);
            let (before, after) = self.threads.split_at(first);
            let threads = after.iter().chain(before).enumerate();
            threads
                .map(|(n, thread)| Seat::new(thread, n == 0))
                .collect()
        };
        let seats = seats.into_iter();
        let joined = seats.map(|seat| WorkerHandle::join(seat, disk.clone(), pin_memory));
        joined.collect()
    }
}
