//! Threads that connect to a server: they know names and make sockets, which workers may have no
//! right to, nor who is started by one.

use fathom_core::{ThreadKind, thread_starts};
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;

type Job = Box<dyn FnOnce() + Send>;

/// Starts a thread for each attempt, on behalf of whoever asks; until this is dropped.
pub(super) struct Connector(Sender<Job>);

impl Connector {
    /// By a thread that may do what connecting takes.
    pub(super) fn start() -> io::Result<Connector> {
        let (jobs, asked) = channel::<Job>();
        let named = |name: &str| Builder::new().name(name.into());
        named("nbd connects").spawn(move || {
            thread_starts(ThreadKind::General);
            for job in asked {
                let (give, given) = channel::<Job>();
                let body = move || given.recv().into_iter().for_each(|job| job());
                match named("nbd connect").spawn(body) {
                    Ok(_) => drop(give.send(job)),
                    // One after the other, then.
                    Err(_) => job(),
                }
            }
        })?;
        Ok(Connector(jobs))
    }

    pub(super) fn ask(&self, job: impl FnOnce() + Send + 'static) {
        // The thread is there as long as this.
        let _ = self.0.send(Box::new(job));
    }
}
