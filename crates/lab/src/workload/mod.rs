//! The benchmark that runs in the guest and on the host: reads or writes of one size, one after
//! another or several at a time, each with its own two stamps.
//!
//! Nothing is printed, written or allocated while it measures: stamps go into memory that was
//! touched (and, where allowed, locked) before the first operation, and are written to a file of
//! events afterwards.
//!
//! ```no_run
//! use fathom_lab::workload::{self, Limit, Options};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let options = Options::new("/dev/vda").with_limit(Limit::Operations(10_000));
//! let outcome = workload::run(&options)?;
//! println!("{} ns", outcome.benchmark.mean_ns);
//! outcome.write("bench.events".as_ref())?;
//! # Ok(())
//! # }
//! ```

mod aio;
mod engine;
mod offsets;
mod options;
mod outcome;
mod records;
mod runner;
mod target;
mod uring;

pub use options::{Engine, Limit, Options, Rw};
pub use outcome::Outcome;

use crate::error::Result;

/// Runs the benchmark to its end.
///
/// # Errors
/// When the options do not fit together or to the file, the file cannot be opened as asked, no
/// engine for the depth is permitted, or every operation failed. Single operations that fail are
/// counted in [`fathom_run::Benchmark::errors`].
pub fn run(options: &Options) -> Result<Outcome> {
    runner::run(options)
}
