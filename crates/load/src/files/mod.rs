//! Loads on the files of a mounted file system: many files that are created, opened, read, appended
//! to and deleted, by threads that each have one operation in flight.
//!
//! The model is FFSB, the Flexible File System Benchmark: an operation is drawn by weight, takes a
//! random file, opens it, transfers its size in blocks, and closes it; and the time measured
//! includes that of the last sync. Its scenarios as the Linux Plumbers Conference of 2010 saw them
//! are not public: what is here are reconstructions. [`run`] is the mail server ([`mail`] has its
//! numbers); of the other five, [`fio`] writes job files, because fio can say them. [`names`] is no
//! scenario of FFSB: one call for each of many files.
//!
//! Everything happens in a new directory below the one that is given. Each thread has some of its
//! directories to itself, so that nobody waits for anybody but in the kernel, and each thread's
//! operations depend on the seed and on nothing else. Symbolic links are never followed.

pub mod fio;
pub mod mail;
pub mod names;
pub mod options;
pub mod report;

mod calls;
mod contents;
mod crew;
mod model;
mod tree;
mod worker;

#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fathom_trace::Clock;

use crate::control::Phase;
use crate::error::Result;
use crate::run::Progress;
use crew::Crew;
use report::Taken;
use tree::Tree;
use worker::Worker;

pub use mail::{Kind, Weights};
pub use options::{Options, Part};
pub use report::{Operation, Report};

/// Makes the files, runs the mail server on them, and removes them again (see [`Options::keep`]).
/// `progress` is called about twice a second.
///
/// # Errors
/// The first thing that went wrong, in one line: options that cannot work, a file system that is
/// full, or a file that somebody else has touched. What was made is removed then, too.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Progress)) -> Result<Report> {
    options.validate()?;
    let mut tree = match options.part {
        Part::Load => Tree::open(options)?,
        Part::All | Part::Files => Tree::create(options)?,
    };
    // Dropped on an error, the tree removes itself.
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
    let mut crew = Crew::new(&options.stop, progress);
    let mut prepared = None;
    if options.part != Part::Load {
        let start = Instant::now();
        crew.work(Phase::Ramp, None, &mut workers, Worker::prepare)?;
        tree.sync()?;
        prepared = Some(start.elapsed());
    }
    let mut taken = Taken::default();
    // Stopped before everything was there: nothing can be measured.
    if options.part != Part::Files && !options.stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        crew.work(Phase::Measure, options.runtime, &mut workers, Worker::run)?;
        // The supervisor may have noticed later.
        let load = { workers.iter() }.filter_map(Worker::ended).max();
        let load = load.map_or(Duration::ZERO, |end| end.saturating_duration_since(start));
        let start = Instant::now();
        tree.sync()?;
        taken.sync = start.elapsed();
        taken.run = load + taken.sync;
        if options.verify {
            crew.work(Phase::Stop, None, &mut workers, Worker::verify)?;
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
