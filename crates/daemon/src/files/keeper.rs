//! Writing on a thread of its own: file systems take their time.

use super::kept::{Found, KeptDisks};
use crate::signals::LeftToThisThread;
use fathom_core::{ThreadKind, thread_starts};
use fathom_spec::DiskSpec;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread;

/// Told what has come of it, on that thread; the error is one line for the user.
pub type Done = Box<dyn FnOnce(Result<(), String>) + Send>;

enum Job {
    Keep(Box<DiskSpec>, Done),
    Forget(String, Done),
    Read(Box<dyn FnOnce(Found) + Send>),
}

/// Does one thing after the other, in the order in which it is told.
pub struct Keeper(Sender<Job>);

impl Keeper {
    pub fn start(kept: KeptDisks) -> io::Result<Keeper> {
        let (send, jobs) = channel();
        let _signals = LeftToThisThread::new();
        thread::Builder::new().name("files".into()).spawn(move || {
            thread_starts(ThreadKind::General);
            for job in jobs {
                match job {
                    Job::Keep(disk, done) => done(kept.keep(&disk)),
                    Job::Forget(name, done) => done(kept.forget(&name)),
                    Job::Read(done) => done(kept.read()),
                }
            }
        })?;
        Ok(Keeper(send))
    }

    pub fn keep(&self, disk: DiskSpec, done: Done) {
        self.send(Job::Keep(Box::new(disk), done));
    }

    pub fn forget(&self, name: String, done: Done) {
        self.send(Job::Forget(name, done));
    }

    pub fn read(&self, done: Box<dyn FnOnce(Found) + Send>) {
        self.send(Job::Read(done));
    }

    fn send(&self, job: Job) {
        // The thread ends when this is dropped.
        let _ = self.0.send(job);
    }
}
