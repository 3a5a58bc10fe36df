//! A pool of threads that many disks share.

use crate::disk::{Disk, DiskError};
use crate::engine::Engine;
use crate::handle::WorkerHandle;
use crate::pooled::Pooled;
use crate::seat::{PoolThread, Seat};
use crate::thread::{self, Parts, WorkerOptions, failed};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Threads, each of which has workers of many disks and one engine for them. Its disks take turns, so none
/// of them gets more of a thread than another; but who makes a worker wait (a guest whose memory's pages do
/// not come) makes all of its thread wait.
///
/// The threads end when neither the pool nor a worker is left.
pub struct Pool {
    threads: Vec<Arc<PoolThread>>,
    /// While a disk chooses its first thread.
    choosing: Mutex<()>,
}

impl Pool {
    /// Start the threads, at least one. `engine` is called on each of them.
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

    /// How many threads it has.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// What each of them has used of a CPU.
    pub fn cpu_times(&self) -> Vec<Duration> {
        let threads = self.threads.iter();
        let times = threads.map(|thread| thread.id().cpu_time().unwrap_or_default());
        times.collect()
    }

    /// A worker for `disk` on each thread. The first one, which has the most to do if the disk has few
    /// queues, is on the thread that is the first of the fewest disks. `pin_memory`: see
    /// [`Engine::pin_memory`].
    pub fn join(
        &self,
        disk: &Arc<dyn Disk>,
        pin_memory: bool,
    ) -> Result<Vec<WorkerHandle>, DiskError> {
        let seats: Vec<_> = {
            let _choosing = self.choosing.lock().unwrap_or_else(|e| e.into_inner());
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
