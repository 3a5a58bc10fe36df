//! Collectors: each records one layer of the stack into a file of events of a round's folder.
//!
//! All are used alike: [`Collector`]s are started one by one, run during the window, are halted
//! together, and then write what they have ([`stop_all`]). Which of them follow a disk's requests on
//! a host is one list ([`on_host`]). Those over the kernel's tracing are
//! built on [`ftrace::Recorder`], each with an instance of its own.

pub mod block;
mod btf;
mod clocks;
pub mod fathom;
pub mod ftrace;
pub mod futex;
pub mod guest;
pub mod io_calls;
pub mod kvm;
pub mod on_host;
pub mod qemu;
pub mod scene;
pub mod symbols;
pub mod syscalls;
pub mod tracefs;

use fathom_units::cause;
use std::path::Path;

use fathom_run::{Pair, StreamInfo};

use crate::error::Result;

pub use clocks::{pair, realtime_minus_monotonic_ns, tsc_khz};
pub use tracefs::{Instance, Tracefs, remove_all, remove_all_on_abort};

/// What a collector leaves in a round's folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Its files.
    pub streams: Vec<StreamInfo>,
    /// What it could not do, a line each, for the report's reader.
    pub problems: Vec<String>,
}

impl Collected {
    /// Adds what another collector left.
    pub fn merge(&mut self, other: Collected) {
        self.streams.extend(other.streams);
        self.problems.extend(other.problems);
    }
}

/// A collector that runs.
pub trait Collector {
    /// Its name in [`Round::traced`](fathom_run::Round::traced), and that of its file.
    fn name(&self) -> &'static str;

    /// Ends recording, quickly; what was recorded is kept.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn halt(&mut self) -> Result<()>;

    /// Keeps only what happened between two instants: collectors that were started one after the
    /// other shall tell of the same time.
    fn keep(&mut self, since: Pair, until: Pair);

    /// Writes what was recorded into the folder `round`.
    ///
    /// # Errors
    /// When it cannot be read or written.
    fn stop(self: Box<Self>, round: &Path) -> Result<Collected>;
}

/// Halts all collectors, then lets each write its file. One that fails becomes a problem: what
/// the others have stays usable.
pub fn stop_all(mut collectors: Vec<Box<dyn Collector>>, round: &Path) -> Collected {
    let mut all = Collected::default();
    for collector in &mut collectors {
        if let Err(error) = collector.halt() {
            all.problems
                .push(format!("{}: {}", collector.name(), cause(error)));
        }
    }
    for collector in collectors {
        let name = collector.name();
        match collector.stop(round) {
            Ok(collected) => all.merge(collected),
            Err(error) => all.problems.push(format!("{name}: {}", cause(error))),
        }
    }
    all
}

/// A collector as one of many.
fn boxed<C: Collector + 'static>(started: Result<C>) -> Result<Box<dyn Collector>> {
    started.map(|collector| Box::new(collector) as Box<dyn Collector>)
}
