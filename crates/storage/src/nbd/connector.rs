//! Threads that connect to a server. Connecting needs to resolve names and open sockets, for which
//! workers and the threads they start may lack the privileges.

use fathom_core::{ThreadKind, thread_starts};
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;

type Job = Box<dyn FnOnce() + Send>;

/// Runs each connection attempt on a thread of its own, until this value is dropped.
pub(super) struct Connector(Sender<Job>);

impl Connector {
    /// Starts the connecting thread. The calling thread must have the privileges to connect.
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
                    // Without another thread, attempts run one after the other.
                    Err(_) => job(),
                }
            }
        })?;
        Ok(Connector(jobs))
    }

    pub(super) fn ask(&self, job: impl FnOnce() + Send + 'static) {
        // The receiving thread ends only after this value is dropped.
        let _ = self.0.send(Box::new(job));
    }
}
