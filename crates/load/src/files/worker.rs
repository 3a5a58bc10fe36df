//! A worker thread: creates its files, performs its operations, and verifies its files.

use std::collections::BTreeSet;
use std::time::Instant;

use fathom_trace::Clock;
use fathom_trace::histogram::{Counts, FINE};

use super::calls::{Calls, Moved};
use super::model::Model;
use super::options::{Options, SECTOR};
use super::tree::{Tree, file_name};
use super::worker_group::Watched;
use crate::cpu;
use crate::error::{Error, Result};
use crate::verify::Verified;

/// Totals of the operations of one kind.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub moved: Moved,
    /// Latencies of the operations, in ticks.
    pub latency: Counts<FINE>,
}

/// Measurements of one thread.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Totals, indexed by [`super::mail::Kind`].
    pub kinds: [Tally; 5],
    /// CPU time of this thread during the load, in ns.
    pub cpu_ns: u64,
    /// Number of verified blocks.
    pub verified: Verified,
}

/// State of a thread, which is kept between phases.
#[derive(Debug)]
pub struct Worker<'a> {
    options: &'a Options,
    thread: u16,
    model: Model,
    calls: Calls<'a>,
    measured: Measured,
    ended: Option<Instant>,
}

impl<'a> Worker<'a> {
    pub fn new(options: &'a Options, tree: &'a Tree, thread: u16) -> Worker<'a> {
        Worker {
            options,
            thread,
            model: Model::new(options, thread, tree.align()),
            calls: Calls::new(options, tree, thread),
            measured: Measured::default(),
            ended: None,
        }
    }

    /// Creates the files that exist before the load.
    pub fn prepare(&mut self, watched: Watched<'_>) -> Result<()> {
        for (done, file) in self.model.files().iter().enumerate() {
            if !watched.goes_on(done as u64)? {
                break;
            }
            self.calls.prepare(*file)?;
        }
        Ok(())
    }

    /// Runs the load.
    pub fn run(&mut self, watched: Watched<'_>) -> Result<()> {
        let cpus = &self.options.cpus;
        if !cpus.is_empty() {
            cpu::pin(cpus[usize::from(self.thread) % cpus.len()])?;
        }
        let (clock, cpu_ns) = (Clock::get(), cpu::thread_ns());
        let mut completed = 0;
        while completed < self.options.number_ios.unwrap_or(u64::MAX) {
            if !watched.goes_on(completed)? {
                break;
            }
            let step = self.model.next();
            let start = clock.now();
            let moved = self.calls.perform(&step)?;
            let taken = clock.now().saturating_sub(start);
            let tally = &mut self.measured.kinds[step.kind as usize];
            tally.latency.record(taken);
            tally.moved.ios += moved.ios;
            tally.moved.bytes += moved.bytes;
            completed += 1;
        }
        self.ended = Some(Instant::now());
        self.measured.cpu_ns = cpu::thread_ns() - cpu_ns;
        Ok(())
    }

    /// Returns when the load ended, or `None` before that.
    pub fn ended(&self) -> Option<Instant> {
        self.ended
    }

    /// Reads and checks all files of this thread.
    pub fn verify(&mut self, watched: Watched<'_>) -> Result<()> {
        for (done, file) in self.model.files().iter().enumerate() {
            if !watched.goes_on(done as u64)? {
                break;
            }
            self.calls.check(*file)?;
        }
        Ok(())
    }

    /// Returns an error if a directory contains a file that the model does not have.
    pub fn verify_names(tree: &Tree, workers: &[Worker<'_>]) -> Result<()> {
        for worker in workers {
            let known: BTreeSet<String> = { worker.model.files() }
                .iter()
                .map(|f| file_name(f.id))
                .collect();
            for dir in worker.model.dirs() {
                if let Some(name) = tree.list(*dir)?.into_iter().find(|n| !known.contains(n)) {
                    return Err(Error::Changed(format!(
                        "{} exists, and should not",
                        tree.path_of_dir(*dir).join(name).display()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Consumes the worker, and returns its measurements.
    pub fn into_measured(self) -> Measured {
        let per_block = u64::from(self.options.bs / SECTOR);
        Measured {
            verified: Verified {
                written: self.calls.written / per_block,
                checked: self.calls.checked / per_block,
            },
            ..self.measured
        }
    }
}
