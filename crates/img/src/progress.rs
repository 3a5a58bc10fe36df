//! How far a job is, for people and for programs; and whether it is to end.

use crate::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What happens during a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Bytes of the disk that are dealt with, of all that are to be.
    Progress { done: u64, total: u64 },
    /// Something the user should know, in one line.
    Warning(String),
}

/// Told of each event, in order.
pub type Watcher<'a> = dyn FnMut(Event) + 'a;

/// How often progress is told, at most.
const INTERVAL: Duration = Duration::from_millis(100);

/// How far a job is.
pub struct Progress<'a> {
    watcher: &'a mut Watcher<'a>,
    /// Set by whoever wants the job to end early.
    stop: &'a AtomicBool,
    done: u64,
    total: u64,
    told: Option<Instant>,
}

impl<'a> Progress<'a> {
    pub fn new(watcher: &'a mut Watcher<'a>, stop: &'a AtomicBool) -> Progress<'a> {
        Progress {
            watcher,
            stop,
            done: 0,
            total: 0,
            told: None,
        }
    }

    /// So many bytes are to be dealt with.
    pub fn begin(&mut self, total: u64) {
        (self.done, self.total, self.told) = (0, total, None);
        self.tell();
    }

    /// So many more are.
    pub fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if self.told.is_none_or(|told| told.elapsed() >= INTERVAL) {
            self.tell();
        }
    }

    /// All are.
    pub fn end(&mut self) {
        self.done = self.total;
        self.tell();
    }

    fn tell(&mut self) {
        self.told = Some(Instant::now());
        (self.watcher)(Event::Progress {
            done: self.done,
            total: self.total,
        });
    }

    pub fn warn(&mut self, line: &str) {
        (self.watcher)(Event::Warning(line.to_owned()));
    }

    /// Fails if the job is to end.
    pub fn check(&self) -> Result<(), Error> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    }
}
