//! Collectors, each of which records one layer of the stack into an event file in a round's folder.
//!
//! All [`Collector`]s are used alike: they are started one by one, run during the window, are
//! halted together, and then write their files ([`stop_all`]). The collectors that follow a disk's
//! requests on a host are in one list ([`on_host`]). Collectors over the kernel's tracing are built
//! on [`ftrace::Recorder`], each with its own instance.

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

/// Result of a collector in a round's folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The event files.
    pub streams: Vec<StreamInfo>,
    /// Problems for the report, one line each.
    pub problems: Vec<String>,
}

impl Collected {
    /// Adds the result of another collector.
    pub fn merge(&mut self, other: Collected) {
        self.streams.extend(other.streams);
        self.problems.extend(other.problems);
    }
}

/// A running collector.
pub trait Collector {
    /// Returns the name of the collector in [`Round::traced`](fathom_run::Round::traced) and of its
    /// file.
    fn name(&self) -> &'static str;

    /// Stops recording quickly. The recorded events stay.
    ///
    /// # Errors
    /// When the kernel rejects it.
    fn halt(&mut self) -> Result<()>;

    /// Restricts the recording to the time between two instants, so that collectors that were
    /// started one after the other cover the same time.
    fn keep(&mut self, since: Pair, until: Pair);

    /// Writes the recorded events into the folder `round`.
    ///
    /// # Errors
    /// When the events cannot be read or written.
    fn stop(self: Box<Self>, round: &Path) -> Result<Collected>;
}

/// Halts all collectors, then makes each write its file. A collector that fails adds a problem; the
/// results of the others stay usable.
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

/// Converts a concrete collector to a boxed one.
fn boxed<C: Collector + 'static>(started: Result<C>) -> Result<Box<dyn Collector>> {
    started.map(|collector| Box::new(collector) as Box<dyn Collector>)
}
