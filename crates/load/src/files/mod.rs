//! Loads on the files of a mounted file system. Threads create, open, read, append to and delete
//! many files. Each thread has one operation in flight.
//!
//! The model is FFSB, the Flexible File System Benchmark. Operations are drawn by weight. An
//! operation opens a random file, transfers its data in blocks, and closes the file. The measured
//! time includes the final sync. The scenarios of the Linux Plumbers Conference 2010 are not
//! public, so these are reconstructions. [`run`] runs the mail server, whose numbers are in
//! [`mail`]. The other five scenarios can be expressed as fio jobs, and [`fio`] writes their job
//! files. [`names`] is not a scenario of FFSB: it executes one call for each of many files.
//!
//! All files are created in a new directory below the given one. Each thread has directories of its
//! own, so that threads wait for each other only in the kernel. A thread's operations depend only
//! on the options, including the seed. Symbolic links are never followed.

pub mod fio;
pub mod mail;
pub mod names;
pub mod options;
pub mod report;

mod calls;
mod contents;
mod model;
mod tree;
mod worker;
mod worker_group;

#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fathom_trace::Clock;

use crate::control::Phase;
use crate::error::Result;
use crate::run::Progress;
use report::Taken;
use tree::Tree;
use worker::Worker;
use worker_group::WorkerGroup;

pub use mail::{Kind, Weights};
pub use options::{Options, Part};
pub use report::{Operation, Report};

/// Creates the files, runs the mail server on them, and removes them unless [`Options::keep`] is
/// set. Calls `progress` about twice a second.
///
/// # Errors
/// The first error, in one line: invalid options, a full file system, or a file that another
/// process has changed. Created files are also removed after an error, unless they are to be kept.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Progress)) -> Result<Report> {
    options.validate()?;
    let mut tree = match options.part {
        Part::Load => Tree::open(options)?,
        Part::All | Part::Files => Tree::create(options)?,
    };
    // On an error, dropping the tree removes it.
    let mut report = measure(options, &tree, progress)?;
    match options.keep || options.part == Part::Files {
        true => report.kept = Some(tree.keep()),
        false => tree.remove()?,
    }
    Ok(report)
}

fn measure(options: &Options, tree: &Tree, progress: &mut dyn FnMut(&Progress)) -> Result<Report> {
    let mut workers: Vec<Worker<'_>> = (0..options.threads)
        .map(|thread| Worker::new(options, tree, thread))
        .collect();
    let mut worker_group = WorkerGroup::new(&options.stop, progress);
    let mut prepared = None;
    if options.part != Part::Load {
        let start = Instant::now();
        worker_group.work(Phase::Ramp, None, &mut workers, Worker::prepare)?;
        tree.sync()?;
        prepared = Some(start.elapsed());
    }
    let mut taken = Taken::default();
    // If the run was stopped before all files existed, nothing can be measured.
    if options.part != Part::Files && !options.stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        worker_group.work(Phase::Measure, options.runtime, &mut workers, Worker::run)?;
        // Use the workers' own end times, because the supervisor may notice the end later.
        let load = { workers.iter() }.filter_map(Worker::ended).max();
        let load = load.map_or(Duration::ZERO, |end| end.saturating_duration_since(start));
        let start = Instant::now();
        tree.sync()?;
        taken.sync = start.elapsed();
        taken.run = load + taken.sync;
        if options.verify {
            worker_group.work(Phase::Stop, None, &mut workers, Worker::verify)?;
            Worker::verify_names(tree, &workers)?;
        }
    }
    let measured: Vec<_> = workers.into_iter().map(Worker::into_measured).collect();
    let ns_per_tick = 1e9 / Clock::get().hz();
    Ok(Report::new(
        options,
        prepared,
        taken,
        &measured,
        ns_per_tick,
    ))
}
