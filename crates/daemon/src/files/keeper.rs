//! Reads and writes the definitions of disks on a thread of its own, because file systems can be
//! slow.

use super::kept::KeptDisks;
use fathom_control::Found;
use fathom_core::{ThreadKind, thread_starts};
use fathom_host::signals::LeftToThisThread;
use fathom_spec::DiskSpec;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread;

/// Called with the result, on that thread. The error is one line for the user.
pub type Done = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Called with a disk's definition, on that thread. `None`: the file does not exist.
pub type DoneReading = Box<dyn FnOnce(Result<Option<Box<DiskSpec>>, String>) + Send>;

enum Job {
    Keep(Box<DiskSpec>, Done),
    Forget(String, Done),
    Read(Box<dyn FnOnce(Found) + Send>),
    ReadOne(String, DoneReading),
}

/// Executes jobs one after the other, in their order.
pub struct Keeper(Sender<Job>);

impl Keeper {
    pub fn start(kept: KeptDisks) -> io::Result<Keeper> {
        let (send, jobs) = channel();
        let _signals = LeftToThisThread::begin();
        thread::Builder::new().name("files".into()).spawn(move || {
            thread_starts(ThreadKind::General);
            for job in jobs {
                match job {
                    Job::Keep(disk, done) => done(kept.keep(&disk)),
                    Job::Forget(name, done) => done(kept.forget(&name)),
                    Job::Read(done) => done(kept.read()),
                    Job::ReadOne(name, done) => done(kept.read_one(&name)),
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

    /// Reads the file of one disk.
    pub fn read_one(&self, name: String, done: DoneReading) {
        self.send(Job::ReadOne(name, done));
    }

    fn send(&self, job: Job) {
        // (The thread runs until this sender is dropped.)
        let _ = self.0.send(job);
    }
}
