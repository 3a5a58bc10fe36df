//! Progress and cancellation of a job.

use crate::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// An event during a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Bytes of the disk that are processed, and the total number of bytes to process.
    Progress {
        /// Number of bytes that are processed.
        done: u64,
        /// Number of bytes to process in total.
        total: u64,
    },
    /// A warning for the user, in one line.
    Warning(String),
}

/// Callback that receives each event, in order.
pub type Watcher<'a> = dyn FnMut(Event) + 'a;

/// Minimum time between two progress events.
const INTERVAL: Duration = Duration::from_millis(100);

/// Progress of a job.
pub struct Progress<'a> {
    watcher: &'a mut Watcher<'a>,
    /// Set by another thread to cancel the job.
    stop: &'a AtomicBool,
    done: u64,
    total: u64,
    told: Option<Instant>,
}

impl<'a> Progress<'a> {
    /// Creates the progress of a job, which reports to `watcher`. Setting `stop` cancels the job.
    pub fn new(watcher: &'a mut Watcher<'a>, stop: &'a AtomicBool) -> Progress<'a> {
        Progress {
            watcher,
            stop,
            done: 0,
            total: 0,
            told: None,
        }
    }

    /// Starts the job's progress at 0 of `total` bytes.
    pub fn begin(&mut self, total: u64) {
        (self.done, self.total, self.told) = (0, total, None);
        self.tell();
    }

    /// Adds to the number of processed bytes. Reports the progress at most ten times per second.
    pub fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if self.told.is_none_or(|told| told.elapsed() >= INTERVAL) {
            self.tell();
        }
    }

    /// Reports that all bytes are processed.
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

    /// Reports a warning for the user, in one line.
    pub fn warn(&mut self, line: &str) {
        (self.watcher)(Event::Warning(line.to_owned()));
    }

    /// Returns [`Error::Interrupted`] if the job is cancelled.
    pub fn check(&self) -> Result<(), Error> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    }
}
