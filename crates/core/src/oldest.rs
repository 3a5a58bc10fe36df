//! The oldest request that a worker has in flight.

use fathom_trace::{Stage, TraceRecord};

/// A request in flight, reported as the oldest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oldest {
    /// Trace record of the request, as if the reply were sent now.
    pub record: TraceRecord,
    /// Stage that the request has reached.
    pub stage: Stage,
}
